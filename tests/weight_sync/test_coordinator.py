"""The report of a refit: what its time consists of."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from tiny_refits import Run, TinyEngine

from rlframework.interfaces.generation import WeightReport
from rlframework.weight_sync import coordinator


class Starting(TinyEngine):
    """Its software starts in the first update."""

    starts = iter((7.0, 0.0))

    def finish_weight_update(self) -> WeightReport:
        return replace(super().finish_weight_update(), start_seconds=next(self.starts))


def test_the_start_of_an_engine_is_not_part_of_the_refit(monkeypatch):
    run, times = Run([TinyEngine(), Starting()]), iter((100.0, 110.0, 200.0, 202.0))
    monkeypatch.setattr(coordinator, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    first = run.refitter.refit().metrics()
    run.step()
    second = run.refitter.refit().metrics()
    assert (first["time/refit"], first["time/engine_start"]) == (3.0, 7.0)
    assert second["time/refit"] == 2.0
    assert "time/engine_start" not in second
