"""Probing an architecture before its weights are loaded, and the errors if it cannot be packed."""

from __future__ import annotations

import pytest
import torch
from transformers import AttentionInterface, BloomConfig, LlamaConfig

from rlframework.base.errors import NotSupported
from rlframework.config.policy import PolicyConfig
from rlframework.models.attention import ATTENTION
from rlframework.models.probing import probe_packing

CPU = torch.device("cpu")
PACKED = PolicyConfig(model_name="m", backend="mine", batching={"mode": "packed"})
LLAMA = {"vocab_size": 30, "hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}


def test_probing_registers_packed_attention(monkeypatch):
    monkeypatch.delitem(AttentionInterface._global_mapping, ATTENTION, raising=False)
    assert probe_packing(PACKED, LlamaConfig(**LLAMA), CPU, "auto")
    assert ATTENTION in AttentionInterface()  # for the full model


def test_what_cannot_be_packed_is_named_with_the_attention_if_it_was_configured():
    with pytest.raises(NotSupported, match="BloomForCausalLM does not keep packed sequences apart") as caught:
        probe_packing(PACKED, BloomConfig(vocab_size=30, hidden_size=16, n_layer=2, n_head=2), CPU, "auto")
    assert "attention=" not in str(caught.value)
    with pytest.raises(NotSupported, match=r"LlamaForCausalLM with policy\.mine\.attention=eager does not keep packed"):
        probe_packing(PACKED, LlamaConfig(**LLAMA), CPU, "eager")
