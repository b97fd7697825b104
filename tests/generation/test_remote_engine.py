"""Exchanges with an engine in a worker group of its own: who waits for them, and how long its worker serves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stub_engines import request, run

from rlframework.base.errors import WorkerLost
from rlframework.generation import client, worker
from rlframework.generation.client import GenerationClient
from rlframework.generation.engine_handle import RemoteEngine
from rlframework.generation.worker import GenerationWorker
from rlframework.interfaces.generation import GenerationResult, Incoming, Outgoing, WeightSpan
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerContext
from rlframework.workers.dispatch import Dispatch, DispatchingWorkerGroup

Callback = Callable[[list[Any] | None], None]


class Group(DispatchingWorkerGroup):
    """An engine that finishes each request at once, in a group that calls back with `brings(results)` if it is set."""

    def __init__(self, brings: Callable[[list[Any]], list[Any] | None] | None, error: Exception | None = None) -> None:
        super().__init__(NamedSharding([0], ["data_parallel"]))
        self._brings, self._error = brings, error
        self.callbacks: list[Callback] = []
        self.waited: list[int] = []

    def _run(self, method_name: str, plan: Dispatch) -> MultiWorkerFuture:
        requests = plan.kwargs[0]["requests"]
        results = [
            GenerationResult(each.request_id, each.prompt_ids, torch.zeros(1), "length", (WeightSpan(0, 1, 1),))
            for each in requests
        ]
        return MultiWorkerFuture([Incoming(results)])

    def when_done(self, future: MultiWorkerFuture, callback: Callback) -> bool:
        if self._brings is not None:
            threading.Thread(target=callback, args=(self._brings(future.futures),)).start()
            return True
        self.callbacks.append(callback)
        return False

    def get_all_worker_results(self, future: MultiWorkerFuture) -> list[Any]:
        self.waited.append(threading.get_ident())
        if self._error is not None:
            raise self._error
        return future.futures

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        return True


def completed(group: Group, requests: int = 3) -> RemoteEngine:
    """Send requests one after the other; return the handle."""
    engine = RemoteEngine(group, "engine 0")

    async def send() -> None:
        sender = GenerationClient([engine], limit=1)
        for number in range(requests):
            assert (await sender.generate(request(number))).request_id == request(number).request_id

    try:
        run(send)
    finally:
        engine.close()
    return engine


def test_a_group_that_does_not_is_waited_for_in_one_thread() -> None:
    group = Group(brings=None)
    completed(group)
    assert len(group.waited) == 3
    assert set(group.waited) == {group.waited[0]} != {threading.get_ident()}


def test_a_failed_call_is_raised_by_the_group_and_the_engine_is_lost() -> None:
    group = Group(brings=lambda results: None, error=WorkerLost("rank 0 died\nwith a traceback"))
    engine = RemoteEngine(group, "engine 0")
    with pytest.raises(WorkerLost, match="rank 0 died"):
        run(lambda: GenerationClient([engine], limit=1).generate(request(0)))
    engine.close()
    assert engine.lost
    assert engine.loss == "rank 0 died"
    assert group.waited
    assert threading.get_ident() not in group.waited


class Silent(Group):
    """Promises to call back, and does not."""

    def when_done(self, future: MultiWorkerFuture, callback: Callback) -> bool:
        self.callbacks.append(callback)
        return True


def test_a_late_exchange_is_waited_for_so_that_it_meets_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_LATE", 0.05)
    group = Silent(brings=None)
    completed(group, requests=1)
    assert len(group.waited) == 1


def test_a_callback_after_the_thread_changes_nothing() -> None:
    group = Silent(brings=None)
    engine = RemoteEngine(group, "engine 0")
    exchange = engine.exchange([Outgoing((request(0),))], 1.0)
    assert not exchange.done()
    engine.start("get_info", requests=())  # waits for the exchange
    (first,) = exchange.result()
    group.callbacks[0]([])
    assert exchange.result() == [first]
    engine.close()
    group.callbacks[0](None)  # a thread of a closed handle is not started again
    assert len(group.waited) == 1


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
