"""Freed memory goes back to the system, and not too often."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlframework.policy.malloc_trim import Heap


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc gives memory back when told to")
def test_what_was_freed_leaves_the_process() -> None:
    heap = Heap(every=0.0)
    pieces = [bytearray(100_000) for _ in range(2000)]  # below the size from which the C library maps each alone
    kept = pieces[::50]  # the heap cannot shrink from its end
    del pieces
    before = _resident_mb()
    assert heap.give_back()
    assert before - _resident_mb() > 100
    assert len(kept) == 40


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc gives memory back when told to")
def test_it_is_not_done_again_before_its_time() -> None:
    times = iter((0.0, 1.0, 10.0, 15.0, 19.9, 20.0))
    heap = Heap(clock=lambda: next(times), every=10.0)
    assert [heap.give_back() for _ in range(5)] == [False, True, False, False, True]
