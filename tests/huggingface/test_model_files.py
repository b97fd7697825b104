"""Files of model directories that cannot be used: one error that names the file, without torch or transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlframework.base.errors import DataError
from rlframework.huggingface.hub import check_model_files

CONFIG = {"model_type": "llama", "hidden_size": 4, "num_hidden_layers": 2, "text_config": {"num_experts": 3}}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards with an index."""
    files = {"model-1.safetensors": ["a", "b"], "model-2.safetensors": ["c"]}
    for file, names in files.items():
        save_file({name: np.zeros((2, 3), np.float32) for name in names}, tmp_path / file)
    index = {"weight_map": {name: file for file, names in files.items() for name in names}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_complete_model_passes(folder: Path) -> None:
    check_model_files(folder)
    check_model_files(folder / "empty")  # such as the directory of a tokenizer


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "must be a JSON object, but is of type list"),
        ("{", "is not valid JSON"),
        ('{"a": "\\ud800"}', "is not valid JSON: .*surrogates"),
        ("[" * 100_000, "is nested too deeply"),
        ('{"a": NaN}', "NaN is not a value"),
        ('{"num_hidden_layers": 4}', "num_hidden_layers is 4, but the weights are only 3 tensors"),
        ('{"text_config": {"num_experts": 1000001}}', r"text_config\.num_experts is 1000001, but at most 1,000,000"),
    ],
)
def test_a_configuration_that_cannot_be_used(folder: Path, text: str, message: str) -> None:
    (folder / "config.json").write_text(text)
    with pytest.raises(DataError, match=rf"config\.json.*{message}"):
        check_model_files(folder)


def test_files_that_cannot_be_read(folder: Path) -> None:
    (folder / "config.json").write_bytes(b"\xff{}")
    with pytest.raises(DataError, match=r"config\.json is not valid JSON: 'utf-8'"):
        check_model_files(folder)
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(DataError, match=r"config\.json is not a file"):
        check_model_files(folder)


def truncate(folder: Path) -> None:
    data = (folder / "model-1.safetensors").read_bytes()
    (folder / "model-1.safetensors").write_bytes(data[:-1])


def header_of_10_gb(folder: Path) -> None:
    (folder / "model-1.safetensors").write_bytes((10 << 30).to_bytes(8, "little") + b"{}")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, r"model-1\.safetensors is damaged or truncated"),
        (header_of_10_gb, r"model-1\.safetensors is damaged or truncated"),
        (lambda folder: (folder / "model-2.safetensors").unlink(), r"weight_map\.c is in model-2.*, which is missing"),
        (
            lambda folder: save_file({"b": np.zeros(1)}, folder / "model-3.safetensors"),
            r"model-3\.safetensors and model-1\.safetensors both have the weight b",
        ),
    ],
)
def test_weights_that_are_damaged(folder: Path, damage: Any, message: str) -> None:
    damage(folder)
    with pytest.raises(DataError, match=message):
        check_model_files(folder)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ([], "must be a JSON object"),
        ({}, "weight_map must be a JSON object"),
        ({"weight_map": {"a": "../model-1.safetensors"}}, "must be the name of a file in this directory"),
        ({"weight_map": {"a": 5}}, "must be the name of a file in this directory"),
        ({"weight_map": {"z": "model-1.safetensors"}}, "which has no such weight"),
        ({"weight_map": {"a": "model-2.safetensors"}}, r"but model-1\.safetensors has it"),
    ],
)
def test_an_index_that_does_not_belong_to_the_files(folder: Path, index: Any, message: str) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(DataError, match=rf"index\.json.*{message}"):
        check_model_files(folder)
