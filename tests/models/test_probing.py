"""What is found out about a kind of model before its weights are loaded, and what is told where it cannot be packed."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, BloomConfig, LlamaConfig

from rlframework.config.policy import PolicyConfig
from rlframework.errors import NotSupported
from rlframework.models.attention import SEGMENTS
from rlframework.models.probing import try_kind

CPU = torch.device("cpu")
PACKED = PolicyConfig(model_name="m", backend="mine", batching={"mode": "packed"})
LLAMA = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


def test_the_attention_of_packed_rows_needs_no_registering_before(monkeypatch):
    monkeypatch.delitem(AttentionInterface._global_mapping, SEGMENTS, raising=False)
    assert try_kind(PACKED, LlamaConfig(**LLAMA), CPU, "auto")
    assert SEGMENTS in AttentionInterface()  # for the model itself


def test_a_kind_that_cannot_be_packed_is_told_without_a_key_that_nobody_set():
    with pytest.raises(NotSupported, match="BloomForCausalLM does not keep packed sequences apart") as caught:
        try_kind(PACKED, BloomConfig(vocab_size=30, hidden_size=16, n_layer=2, n_head=2), CPU, "auto")
    assert "attention=" not in str(caught.value)


def test_an_attention_that_was_chosen_and_cannot_be_packed_is_named():
    with pytest.raises(NotSupported, match=r"LlamaForCausalLM with policy\.mine\.attention=eager does not keep packed"):
        try_kind(PACKED, LlamaConfig(**LLAMA), CPU, "eager")
