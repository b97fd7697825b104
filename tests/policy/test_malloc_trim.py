"""Freed memory returns to the operating system, at a limited rate."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rlframework.policy.malloc_trim import MallocTrimmer


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can trim its heap")
def test_freed_memory_leaves_the_process() -> None:
    trimmer = MallocTrimmer(min_interval=0.0)
    blocks = [bytearray(100_000) for _ in range(2000)]  # below the size from which the C library maps each alone
    kept = blocks[::50]  # the trimmer cannot shrink from its end
    del blocks
    before = _resident_mb()
    assert trimmer.trim()
    assert before - _resident_mb() > 100
    assert len(kept) == 40


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can trim its heap")
def test_trims_are_at_least_an_interval_apart() -> None:
    times = iter((0.0, 1.0, 10.0, 15.0, 19.9, 20.0))
    trimmer = MallocTrimmer(clock=lambda: next(times), min_interval=10.0)
    assert [trimmer.trim() for _ in range(5)] == [False, True, False, False, True]
