"""Tiny models made on the spot."""

from __future__ import annotations

import pytest
from transformers import modeling_utils

from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer


def test_saving_a_model_does_not_ask_what_is_around_it(tmp_path, monkeypatch):
    """Accelerate would import all of DeepSpeed for the answer: seconds, and a line on standard output."""

    def ask(*args, **kwargs):
        pytest.fail("asked")

    monkeypatch.setattr(modeling_utils, "unwrap_model", ask)
    made = make_llama(tmp_path / "model", character_tokenizer("ab"), hidden=8, layers=1, heads=2)
    assert (made / "model.safetensors").exists()
    assert modeling_utils.unwrap_model is ask  # put back
