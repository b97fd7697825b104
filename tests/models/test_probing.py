"""Probing an architecture before its weights are loaded; attributes that are replaced for a while."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from transformers import AttentionInterface, BloomConfig, LlamaConfig

from rlframework.base.errors import NotSupported
from rlframework.config.policy import PolicyConfig
from rlframework.models.attention import ATTENTION
from rlframework.models.loading import replacing
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


# --- replaced attributes


class Library:
    option = 1

    def method(self) -> str:
        return "own"


def test_attributes_are_restored_also_after_an_error():
    library = Library()
    with suppress(ZeroDivisionError), replacing(Library, option=2), replacing(library, method=lambda: "other"):
        assert (library.option, library.method()) == (2, "other")
        raise ZeroDivisionError
    assert (library.option, library.method(), vars(library)) == (1, "own", {})


def test_an_attribute_that_the_library_no_longer_has_is_an_error():
    with pytest.raises(AttributeError, match="renamed"), replacing(Library, option=2, renamed=3):
        pass
    assert Library.option == 1
