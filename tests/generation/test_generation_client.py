"""The asynchronous client: order, cancellation, how often engines are called, and faults of engines and refits."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from stub_engines import FakeEngine, request, run, until

from rlframework.base.errors import DeadlineExceeded, EngineNotReady, RequestError, RLFrameworkError, WorkerLost
from rlframework.generation.client import GenerationClient
from rlframework.interfaces.generation import Incoming, Outgoing


async def at_once() -> None:
    """A `gather` that waits for nothing."""


@pytest.mark.parametrize("inline", [False, True])
def test_requests_finish_one_by_one(inline: bool) -> None:
    engines = [FakeEngine(lanes=2, polls=2, inline=inline, limit=3), FakeEngine(inline=inline, limit=3)]
    client = GenerationClient(engines, limit=3)

    async def test() -> None:
        results = await asyncio.gather(*(client.generate(request(number)) for number in range(40)))
        assert [int(each.token_ids) for each in results] == list(range(40))

    run(test)
    run(test)  # another event loop
    assert sorted(engines[0].seen + engines[1].seen) == sorted([f"r{n}" for n in range(40)] * 2)
    assert all(len(engine.threads) == 1 for engine in engines)
    assert (threading.get_ident() in engines[0].threads) is inline


class Notified(FakeEngine):
    notified = True  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("kind", "engines", "batch", "single"),
    [
        (FakeEngine, 1, 0.1, 0.1),
        (FakeEngine, 50, 2.5, 0.1),
        (FakeEngine, 1000, 30.0, 2.0),
        (Notified, 1, 1.0, 1.0),
        (Notified, 50, 2.5, 2.5),
        (Notified, 1000, 30.0, 30.0),
    ],
)
def test_exchanges_of_many_engines_last_longer(
    kind: type[FakeEngine], engines: int, batch: float, single: float
) -> None:
    """All engines have at most 500 exchanges a second, and 20 if no new request can come or they are notified of it."""
    timeouts = []

    class Polled(kind):  # type: ignore[misc,valid-type]
        interval = 0.1

        def _exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> list[Incoming]:
            timeouts.append(timeout)
            return super()._exchange(outgoing, timeout)

    client = GenerationClient([Polled(inline=True) for _ in range(engines)], limit=1)

    async def test() -> None:
        await client.generate_all([request(0)], [None])
        await client.generate(request(1))
        client.gather = at_once  # as for episodes, whose turns arrive one by one
        await client.generate_all([request(2)], [None])

    run(test)
    assert timeouts == pytest.approx([batch, single, single])


def test_an_engine_is_notified_of_requests_and_aborts_once_for_an_exchange() -> None:
    engine = FakeEngine(polls=2)
    client = GenerationClient([engine], limit=3)
    engine.gate.clear()

    async def test() -> None:
        first = asyncio.ensure_future(client.generate(request(0)))
        await until(lambda: engine.threads)  # the exchange has begun
        assert engine.notices == 0
        more = [asyncio.ensure_future(client.generate(request(number))) for number in (1, 2)]
        await asyncio.sleep(0)
        assert engine.notices == 1
        waiting = asyncio.ensure_future(client.generate(request(3)))  # above the limit: not for the engine yet
        await asyncio.sleep(0)
        first.cancel()
        await asyncio.sleep(0)
        assert engine.notices == 1
        engine.gate.set()
        await asyncio.gather(*more, waiting)

    run(test)


def test_an_engine_is_notified_of_what_is_aborted() -> None:
    engine = FakeEngine(polls=10**6)
    client = GenerationClient([engine], limit=3)

    async def test() -> None:
        task = asyncio.ensure_future(client.generate(request(0)))
        await until(lambda: engine.seen)
        engine.gate.clear()
        engine.threads.clear()
        await until(lambda: engine.threads)
        before = engine.notices
        client.interrupt()
        assert engine.notices == before + 1
        engine.gate.set()
        assert (await task).finish_reason == "aborted"

    run(test)


def test_a_call_of_an_engine_ends_its_exchange() -> None:
    engine = FakeEngine()
    engine.gate.clear()
    exchange = engine.exchange([Outgoing()], 10.0)
    assert engine.notices == 0
    engine.notify = engine.gate.set  # type: ignore[method-assign]
    with pytest.raises(AttributeError):  # it has no worker group; the exchange is awaited before
        engine.start("get_info")
    assert exchange.done()


def test_cancelling_and_running_out_of_time_abort_at_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(polls=10**9)
    client = GenerationClient([engine], limit=2)

    async def test() -> None:
        cancelled = asyncio.ensure_future(client.generate(request(0)))
        late = asyncio.ensure_future(client.generate(request(1), timeout=1000.0))
        queued = asyncio.ensure_future(client.generate(request(2, name="queued"), timeout=0.01))
        await until(lambda: len(engine.seen) == 2)
        assert (await queued).finish_reason == "aborted"
        cancelled.cancel()
        loop = asyncio.get_running_loop()
        now = loop.time
        monkeypatch.setattr(loop, "time", lambda: now() + 1000.0)
        assert (await late).finish_reason == "aborted"
        await until(lambda: not engine.held[0])
        assert sorted(engine.aborted) == ["r0", "r1"]

    asyncio.run(test())  # not `run`, whose own limit would have passed


def test_results_that_arrive_after_the_end_of_an_event_loop_are_not_lost() -> None:
    """The loop ends while the engine serves; the exchange is completed by the next one, before a call of the engine."""
    engine = FakeEngine()
    client = GenerationClient([engine], limit=9)
    engine.gate.clear()

    async def interrupted() -> None:
        task = asyncio.ensure_future(client.generate(request(0)))
        await until(lambda: engine.threads)
        task.cancel()

    asyncio.run(interrupted())
    engine.gate.set()

    async def test() -> None:
        assert int((await client.generate(request(1))).token_ids) == 1

    run(test)
    assert engine.seen == ["r0", "r1"]
    assert not engine.held[0]


def test_draining_aborts_what_nobody_waits_for_and_rejects_what_is_awaited() -> None:
    engine = FakeEngine(polls=10**6)
    client = GenerationClient([engine], limit=2)

    async def cancelled() -> None:
        tasks = [asyncio.ensure_future(client.generate(request(number))) for number in range(3)]
        await until(lambda: len(engine.seen) == 2)
        with pytest.raises(RLFrameworkError, match=r"3 generation requests are in progress \(r0, r1, r2\); await or"):
            await client.drain()
        for task in tasks:
            task.cancel()

    run(cancelled)
    run(client.drain)
    assert sorted(engine.aborted) == ["r0", "r1"]
    assert not engine.held[0]
    engine._polls = 1

    async def again() -> None:
        assert [int((await client.generate(request(number))).token_ids) for number in range(4)] == [0, 1, 2, 3]

    run(again)


@pytest.mark.parametrize("cause", ["rejected", "cancelled", "name in use"])
def test_the_rest_of_a_batch_is_aborted_after_an_error(cause: str) -> None:
    engine = FakeEngine(polls=10**6)
    client = GenerationClient([engine], limit=9)

    async def test() -> None:
        last = {"rejected": request(-1), "cancelled": request(2), "name in use": request(0)}[cause]
        batch = asyncio.ensure_future(client.generate_all([request(0), request(1), last], [None] * 3))
        if cause == "cancelled":
            await until(lambda: "r2" in engine.seen)
            batch.cancel()
        with pytest.raises(asyncio.CancelledError if cause == "cancelled" else RequestError):
            await batch
        await client.drain()

    run(test)
    assert not engine.held[0]
    assert set(engine.aborted) == {"cancelled": {"r0", "r1", "r2"}, "rejected": {"r0", "r1"}}.get(cause, set())


@pytest.mark.parametrize("error", [WorkerLost("killed"), DeadlineExceeded("silent")])
def test_requests_of_a_lost_engine_go_to_the_others(error: Exception) -> None:
    lost, other = FakeEngine(polls=10**9), FakeEngine()
    client = GenerationClient([lost, other], limit=2)

    async def test() -> None:
        pending = [asyncio.ensure_future(client.generate(request(number), lane=0)) for number in range(5)]
        await until(lambda: lost.seen)
        lost.fail = error
        assert [int(each.token_ids) for each in await asyncio.gather(*pending)] == list(range(5))
        assert lost.lost
        client.replaced(0, FakeEngine())
        await client.generate(request(5), lane=0)
        assert len(client.engines[0].seen) == 1  # type: ignore[attr-defined]

    run(test)


def test_without_an_engine_left_requests_fail() -> None:
    engine = FakeEngine(polls=10**9)
    client = GenerationClient([engine], limit=1)

    async def test() -> None:
        pending = [asyncio.ensure_future(client.generate(request(number))) for number in range(3)]
        await until(lambda: engine.seen)
        engine.fail = WorkerLost("killed")
        results = await asyncio.gather(*pending, return_exceptions=True)
        assert [type(each) for each in results] == [WorkerLost] * 3
        with pytest.raises(WorkerLost, match="all generation engines are lost: killed"):
            await client.generate(request(4))

    run(test)


@pytest.mark.parametrize("inline", [False, True])
def test_an_error_of_an_engine_is_not_given_to_the_others(inline: bool) -> None:
    """An engine in the driver's process goes on; what it still has of the failed requests is aborted."""
    broken, other = FakeEngine(polls=10**9, inline=inline), FakeEngine()
    client = GenerationClient([broken, other], limit=9)

    async def test() -> None:
        pending = [asyncio.ensure_future(client.generate(request(number), lane=0)) for number in range(2)]
        await until(lambda: broken.seen)
        broken.fail = RLFrameworkError("not finite")
        results = await asyncio.gather(*pending, return_exceptions=True)
        assert [str(each) for each in results] == ["not finite"] * 2
        broken._polls = 1
        assert int((await client.generate(request(3), lane=0)).token_ids) == 3
        assert (broken.aborted == ["r0", "r1"]) is inline
        assert other.seen == ([] if inline else ["r3"])

    run(test)


class Weights:
    """The state of the engines' weights: proven, or those of a refit that failed."""

    proven = True

    def require_ready(self) -> None:
        if not self.proven:
            raise EngineNotReady("their last refit failed")


def test_results_of_an_exchange_during_which_a_refit_fails_are_not_returned():
    engine = FakeEngine()
    weights = Weights()
    client = GenerationClient([engine], limit=4, require_ready=weights.require_ready)

    async def test() -> None:
        engine.gate.clear()
        task = asyncio.ensure_future(client.generate(request(1)))
        await until(lambda: engine.threads)
        weights.proven = False
        engine.gate.set()
        with pytest.raises(EngineNotReady, match="their last refit failed"):
            await task
        weights.proven = True
        assert (await client.generate(request(2))).token_ids.tolist() == [2]

    run(test)
