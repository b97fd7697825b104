"""The asynchronous client: requests and batches, their order, cancellation, and how often engines are called."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence

import pytest
from stub_engines import FakeEngine, request, run, until

from rlframework.base.errors import RLFrameworkError
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


def test_a_batch_is_returned_in_order_each_row_from_its_lane() -> None:
    engines = [FakeEngine(polls=2, limit=3), FakeEngine(limit=3)]
    client = GenerationClient(engines, limit=3)

    async def test() -> None:
        results = await client.generate_all([request(number) for number in range(12)], [0] * 6 + [1] * 6)
        assert [int(each.token_ids) for each in results] == list(range(12))

    run(test)
    assert [engine.seen for engine in engines] == [[f"r{n}" for n in range(6)], [f"r{n}" for n in range(6, 12)]]


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


def test_engines_that_are_called_together_have_short_exchanges_only_while_requests_come() -> None:
    engine = FakeEngine()
    engine.interval = 1.0
    client = GenerationClient([engine], limit=1)
    assert client.longest(engine) == 1.0
    client.gather = at_once
    assert client.longest(engine) == pytest.approx(0.1)


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


def test_a_lane_can_be_chosen_and_sessions_stay() -> None:
    engines = [FakeEngine(), FakeEngine()]
    client = GenerationClient(engines, limit=99)

    async def test() -> None:
        await asyncio.gather(*(client.generate(request(number), lane=1) for number in range(5)))
        await client.generate(request(5, session="s"), lane=1)
        await client.generate(request(6, session="s"))

    run(test)
    assert engines[0].seen == []


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
