"""DeepSpeed's extensions: reported before compilation, rejected with our message when a compiler is missing."""

from __future__ import annotations

import re

import pytest

from rlframework.base.errors import ConfigError
from rlframework_deepspeed import process_state

DISK = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "nvme"}}}


@pytest.fixture
def compiled(monkeypatch, caplog):
    """The names of extensions that a stand-in for DeepSpeed's compiling was asked for, with what had been logged."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    asked = []

    def jit_load(self, verbose=True):
        asked.append((self.name, caplog.messages[-1:]))
        return "the extension"

    monkeypatch.setattr(OpBuilder, "jit_load", jit_load)
    monkeypatch.setattr(OpBuilder, "_loaded_ops", {})
    return asked


def load():
    from deepspeed.ops.op_builder import AsyncIOBuilder

    with process_state.building_engine():
        return AsyncIOBuilder().load()


def test_what_is_compiled_is_told_before_it_begins(compiled, monkeypatch):
    monkeypatch.setattr(process_state, "which", lambda name: f"/usr/bin/{name}")
    assert load() == "the extension"
    assert [name for name, _ in compiled] == ["pin_memory", "async_io"]  # the first is a part of the second
    for name, [said] in compiled:
        assert f"DeepSpeed compiles its extension {name} on first use" in said


@pytest.mark.parametrize("missing", ["g++", "ninja"])
def test_a_missing_compiler_is_told_by_name_and_nothing_begins(compiled, monkeypatch, missing):
    monkeypatch.setattr(process_state, "which", lambda name: None if name == missing else f"/usr/bin/{name}")
    told = f"is compiled on first use, but {re.escape(missing)} cannot be found"
    with pytest.raises(ConfigError, match=f"extension (async_io|pin_memory) {told}"):  # the second, once a process
        load()
    with pytest.raises(ConfigError, match=f"nvme.* {told}"):
        process_state.require_compilers(DISK)
    assert compiled == []


def test_what_needs_no_compiler_asks_for_none(monkeypatch):
    monkeypatch.setattr(process_state, "which", lambda name: None)
    process_state.require_compilers({"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}})
    process_state.require_compilers({})
