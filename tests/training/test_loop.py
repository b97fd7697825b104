"""The loop of steps, around parts that do nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from rlframework.algorithms import loop
from rlframework.algorithms.loop import StepLoop


def test_the_start_of_an_engine_is_not_part_of_the_validation(monkeypatch):
    times = iter((100.0, 112.0))
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    generation = SimpleNamespace(pop_metrics=lambda: {"time/refit": 2.0, "time/engine_start": 7.0})
    made: Any = SimpleNamespace(
        timeline=None, parts=SimpleNamespace(generation=generation), validate=lambda step: ({}, [])
    )
    metrics, _ = StepLoop._timed_validation(made, 0)
    assert metrics == {"time/validation": 5.0, "validation/refit_seconds": 2.0, "time/engine_start": 7.0}
