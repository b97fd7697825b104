"""The simulation of benchmarks/asynchrony.py by hand, its goal at a small size, its files; benchmarks/overlap.py."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def asynchrony(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark's module, with one engine instead of 16."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    module = importlib.import_module("asynchrony")
    for name in ("EASY", "HARD"):
        monkeypatch.setattr(module, name, replace(getattr(module, name), engines=1))
    return module


@pytest.mark.parametrize(("bound", "seconds"), [(0, 1.0 + 0.5 + 0.25), (1, 1.0 + 0.25), (2, 1.0 + 0.25)])
def test_steps_by_hand(asynchrony: Any, bound: int, seconds: float) -> None:
    """Rows of length 1 in as many places; training takes 0.5, and a refit, which stops the engines, 0.25."""
    cluster = replace(asynchrony.EASY, rows_per_place=1.0, sigma=0.0, trainer=0.5, refit=0.25, steps=14)
    run = asynchrony.play(cluster, asynchrony.Tickets, bound, 0)
    assert run.step_time == pytest.approx(seconds)
    assert max(run.staleness) == min(bound, 1)  # the trainer waits for each step, so no group waits for the trainer


def test_the_goal_is_reached_while_other_rules_exceed_the_bound_or_drop(asynchrony: Any) -> None:
    """`measure` itself raises if the ledger breaks its bound or drops a group."""
    easy, hard = (replace(each, engines=2, steps=20) for each in (asynchrony.EASY, asynchrony.HARD))
    assert asynchrony.measure(easy, 2, "rlframework", 2)["throughput"] >= 0.95
    found = {name: asynchrony.measure(hard, 1, name, 1) for name in asynchrony.RULES}
    assert {name for name, one in found.items() if one["staleness_max"] > 1} == {"AReaL", "verl"}
    assert {name for name, one in found.items() if one["dropped_complete"]} == {"prime-rl"}


def test_the_overlap_of_a_round_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 4 s, of which the trainer waits 2.5 s and the engine is busy 2 s; those at both ends do not count."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    overlap = importlib.import_module("overlap")
    trainer = [("wait", 0.0, 0.5), ("generate", 1.0, 3.0), ("train", 3.0, 4.0)]
    line = SimpleNamespace(seconds=4.0, lanes={"trainer": trainer}, busy={"engine 0": 2.0})
    other = SimpleNamespace(seconds=90.0, lanes={}, busy={})
    turns = overlap.step_of([other] * overlap.WARM_UP + [line] * 3 + [other] * overlap.REST)
    assert turns == overlap.Step(seconds=4.0, trainer=1.5, engine=2.0)
    found = overlap.Round(turns, overlap.Step(seconds=2.5, trainer=1.5, engine=2.0))
    assert (found.ratio, found.speed) == (1.25, 1.6)
