"""Writing weights that arrive one at a time."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from rlframework.base.errors import PluginError
from rlframework.policy.checkpoint.pretrained import write_tensors


def test_a_weight_that_is_listed_twice_is_rejected_by_both_names(tmp_path):
    embedding = torch.ones(3, 2)
    weights = {"model.embed_tokens.weight": embedding, "model.norm.weight": torch.ones(2), "lm_head.weight": embedding}
    with pytest.raises(PluginError, match=r"`model\.embed_tokens\.weight` and `lm_head\.weight` are one tensor"):
        write_tensors(tmp_path, iter(weights.items()))


def test_views_of_one_buffer_and_empty_tensors_are_different_weights(tmp_path):
    buffer = torch.arange(6.0)
    weights = {"a": buffer[:2], "b": buffer[2:], "c": torch.empty(0), "d": torch.empty(0)}
    write_tensors(tmp_path, iter(weights.items()))
    written = load_file(tmp_path / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in written.items()} == {
        "a": [0.0, 1.0],
        "b": [2.0, 3.0, 4.0, 5.0],
        "c": [],
        "d": [],
    }
