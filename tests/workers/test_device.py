"""Expandable segments: on unless the user configures the allocator, and off for memory that other processes open."""

from __future__ import annotations

import pytest
import torch

from rlframework.weight_sync.ipc import CudaMemory
from rlframework.workers import device

OTHERS = "roundup_power2_divisions:[64:8,256:4],max_split_size_mb:200"


@pytest.fixture
def settings(monkeypatch):
    """torch's settings as a dictionary with one key, in place of those of this process."""
    found = {"now": ""}
    for name in device.VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_getAllocatorSettings", lambda: found["now"], raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda given: found.update(now=given))
    return found


def test_the_functions_are_torchs():
    functions = device._functions()
    assert functions is not None
    assert isinstance(functions[0](), str)


def test_they_are_enabled(settings):
    assert not device.expandable_segments()
    device.use_expandable_segments()
    assert settings["now"] == "expandable_segments:True"
    assert device.expandable_segments()


@pytest.mark.parametrize("variable", device.VARIABLES)
def test_the_users_settings_are_kept(settings, monkeypatch, variable):
    monkeypatch.setenv(variable, "max_split_size_mb:200")
    device.use_expandable_segments()
    assert settings["now"] == ""


@pytest.mark.parametrize("before", ["", OTHERS, "expandable_segments:False"])
def test_nothing_is_changed_where_they_are_off(settings, before):
    settings["now"] = before
    with device.without_expandable_segments():
        assert settings["now"] == before
    assert settings["now"] == before


@pytest.mark.parametrize("before", [f"expandable_segments:True,{OTHERS}", f"{OTHERS},expandable_segments:true"])
def test_memory_for_other_processes_is_allocated_without_them_and_other_settings_stay(settings, monkeypatch, before):
    settings["now"] = before
    seen = []
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *given, **keys: seen.append(settings["now"]) or empty(*given, **keys))
    assert CudaMemory(16, torch.device("cpu")).raw.nbytes == 16
    assert seen == [f"{OTHERS},expandable_segments:False"]
    assert settings["now"] == f"{OTHERS},expandable_segments:True"


def test_they_return_after_an_error(settings):
    device.use_expandable_segments()
    with pytest.raises(MemoryError), device.without_expandable_segments():
        raise MemoryError
    assert settings["now"] == "expandable_segments:True"
