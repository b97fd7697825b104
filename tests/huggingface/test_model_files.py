"""Model directories: damaged files are one error that names the file, and saves replace only former saves."""

from __future__ import annotations

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rlframework.base.errors import DataError, UserError
from rlframework.huggingface.hub import check_model_files
from rlframework.huggingface.model_directories import check_replaceable, make_llama
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.policy.client import Policy

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


def files_in(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    folder = tmp_path / "proj"
    (folder / "src").mkdir(parents=True)
    for name in ("notes.md", "config.json", "src/train.py"):
        (folder / name).write_text("mine")
    return folder


def test_a_directory_of_the_users_is_not_replaced(project: Path) -> None:
    unreachable = SimpleNamespace()  # a policy without workers: a call of one is an AttributeError
    policy = object.__new__(Policy)
    policy._calls = unreachable
    before = files_in(project)
    for save in (
        lambda path: policy.save_pretrained(path),
        lambda path: policy.save_adapter(path),
        lambda path: policy.save_checkpoint(path, None),
        lambda path: policy.save_checkpoint(str(project.parent / "new"), path),
        lambda path: make_llama(path, character_tokenizer("ab"), hidden=8, layers=1, heads=2),
    ):
        with pytest.raises(UserError, match=r"files that no save wrote \(notes\.md, src\); give another directory"):
            save(str(project))
        with pytest.raises(UserError, match=r"notes\.md.: it is a file"):
            save(str(project / "notes.md"))
        with pytest.raises(UserError, match="give the name of a directory"):
            save(".")
    assert files_in(project) == before
    assert not (project.parent / "new").exists()


def test_a_former_save_may_be_replaced(tmp_path: Path) -> None:
    for name in ("missing", "made", "made"):
        make_llama(tmp_path / name, character_tokenizer("ab"), hidden=8, layers=1, heads=2)
    (tmp_path / "empty").mkdir()
    check_replaceable(tmp_path / "empty")
    written = "model-00001-of-00002.safetensors model.safetensors.index.json checksums.json training.json native.json"
    written += " save.json"
    for name in [*written.split(), "random.safetensors", ".metadata", "__0_0.distcp", "vocab.json", "engine/x"]:
        path = tmp_path / "made" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        check_replaceable(tmp_path / "made")


@pytest.mark.parametrize("name", ["engine/x", "data.safetensors", "results.json", ".git/config", "train.py", "x.model"])
def test_a_model_beside_other_files_is_not_a_former_save(tmp_path: Path, name: str) -> None:
    made = make_llama(tmp_path / "made", character_tokenizer("ab"), hidden=8, layers=1, heads=2)
    (made / name).parent.mkdir(exist_ok=True)
    (made / name).touch()
    with pytest.raises(UserError, match=name.partition("/")[0]):
        check_replaceable(made)
