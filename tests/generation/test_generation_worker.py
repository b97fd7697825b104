"""The worker of an engine: how long an exchange takes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from rlframework.generation import worker
from rlframework.generation.worker import GenerationWorker
from rlframework.interfaces.worker_group import WorkerContext


class Engine:
    """Serves for the time of each poll, by a clock of its own; the poll of number `ends_at` returns a result."""

    def __init__(self, ends_at: int = 10**6, idle: bool = False) -> None:
        self.polls: list[float] = []
        self.seconds = 0.0
        self._ends_at, self._idle = ends_at, idle

    def submit(self, requests: Sequence[Any]) -> None: ...

    def poll(self, timeout: float) -> list[str]:
        self.polls.append(timeout)
        self.seconds += 0.0 if self._idle else timeout
        return ["result"] if len(self.polls) == self._ends_at else []


def serving(monkeypatch: pytest.MonkeyPatch, engine: Engine, noticed_at: int = 10**6) -> GenerationWorker:
    """Return a worker of `engine` that is notified during its poll of number `noticed_at`."""
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: engine.seconds))
    found = object.__new__(GenerationWorker)
    found.engine = engine  # type: ignore[assignment]
    found.context = WorkerContext(notified=lambda: len(engine.polls) >= noticed_at)
    return found


def test_an_exchange_ends_at_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """In polls of 0.1 s, and one for the rest."""
    engine = Engine()
    assert serving(monkeypatch, engine).exchange([], [], 0.35).results == []
    assert engine.polls == pytest.approx([0.1, 0.1, 0.1, 0.05])


@pytest.mark.parametrize(
    ("engine", "noticed_at", "polls"),
    [(Engine(ends_at=3), 10**6, 3), (Engine(), 2, 2), (Engine(idle=True), 10**6, 1)],
    ids=["a result", "a notice", "nothing to serve"],
)
def test_an_exchange_ends_early_with(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, noticed_at: int, polls: int
) -> None:
    found = serving(monkeypatch, engine, noticed_at).exchange([], [], None)
    assert (found.results, len(engine.polls)) == (["result"] if polls == 3 else [], polls)


def test_an_exchange_without_time_serves_once(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Engine()
    serving(monkeypatch, engine).exchange([], [], 0.0)
    assert engine.polls == [0.0]
