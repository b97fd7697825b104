"""The asynchronous client, with engines that answer in a thread of their own or in the driver's."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
import torch

from rlframework.errors import DeadlineExceeded, EngineNotReady, RequestError, RLFrameworkError, WorkerLost
from rlframework.generation.client import GenerationClient
from rlframework.generation.engine_handle import EngineHandle
from rlframework.interfaces.generation import GenerationRequest, GenerationResult
from rlframework.interfaces.generation_exchange import Incoming, Outgoing


class Engine(EngineHandle):
    """Completes each request with its seed after `polls` exchanges; `fail` is raised by the next one."""

    interval = 0.0

    def __init__(self, *, lanes: int = 1, polls: int = 1, inline: bool = False, limit: int = 10**6) -> None:
        super().__init__(None, "fake engine")  # type: ignore[arg-type]  # has no worker group
        self._lanes, self._polls, self._inline, self._limit = lanes, polls, inline, limit
        self.held: list[dict[str, list[Any]]] = [{} for _ in range(lanes)]
        self.fail: Exception | None = None
        self.seen: list[str] = []
        self.aborted: list[str] = []
        self.threads: set[int] = set()
        self.gate = threading.Event()
        self.gate.set()

    @property
    def lanes(self) -> int:
        return self._lanes

    @property
    def in_driver(self) -> bool:
        return self._inline

    def _start_exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> Any:
        raise AssertionError

    def _exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> list[Incoming]:
        self.threads.add(threading.get_ident())
        assert self.gate.wait(10)
        if self.fail is not None:
            error, self.fail = self.fail, None
            self.lost = not self._inline
            raise error
        return [self._serve(lane, out) for lane, out in enumerate(outgoing)]

    def _serve(self, lane: int, out: Outgoing) -> Incoming:
        held = self.held[lane]
        for name in out.abort_ids:
            self.aborted.append(name)
            if name in held:  # engines ignore the ids of finished requests
                held[name][1] = -1
        rejected = {each.request_id: RequestError("no") for each in out.requests if each.seed < 0}
        held |= {each.request_id: [each, self._polls] for each in out.requests if each.request_id not in rejected}
        self.seen += [each.request_id for each in out.requests]
        assert len(held) <= self._limit
        results = []
        for name, (request, left) in list(held.items()):
            held[name][1] = left - 1
            if left <= 1:
                del held[name]
                reason = "aborted" if left < 0 else "stop"
                results.append(GenerationResult(name, torch.tensor([request.seed]), torch.zeros(1), reason, ()))  # type: ignore[arg-type]
        return Incoming(results, rejected)


def request(number: int, session: str | None = None, name: str | None = None) -> GenerationRequest:
    return GenerationRequest(name or f"r{number}", torch.tensor([1]), number, 4, session_id=session)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), 20))


async def until(holds: Callable[[], object]) -> None:
    while not holds():
        await asyncio.sleep(0.001)


@pytest.mark.parametrize("inline", [False, True])
def test_requests_finish_one_by_one(inline: bool) -> None:
    engines = [Engine(lanes=2, polls=2, inline=inline, limit=3), Engine(inline=inline, limit=3)]
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
    engines = [Engine(polls=2, limit=3), Engine(limit=3)]
    client = GenerationClient(engines, limit=3)

    async def test() -> None:
        results = await client.generate_all([request(number) for number in range(12)], [0] * 6 + [1] * 6)
        assert [int(each.token_ids) for each in results] == list(range(12))

    run(test)
    assert [engine.seen for engine in engines] == [[f"r{n}" for n in range(6)], [f"r{n}" for n in range(6, 12)]]


@pytest.mark.parametrize("cause", ["rejected", "cancelled", "name in use"])
def test_the_rest_of_a_batch_is_aborted_after_an_error(cause: str) -> None:
    engine = Engine(polls=10**6)
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


@pytest.mark.parametrize(("engines", "batch", "single"), [(1, 0.1, 0.1), (50, 1.0, 0.1), (1000, 20.0, 2.0)])
def test_exchanges_of_many_engines_last_longer(engines: int, batch: float, single: float) -> None:
    """All engines together have at most 500 in a second, 50 if no request is about to come."""
    timeouts = []

    class Polled(Engine):
        interval = 0.1

        def _exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> list[Incoming]:
            timeouts.append(timeout)
            return super()._exchange(outgoing, timeout)

    client = GenerationClient([Polled(inline=True) for _ in range(engines)], limit=1)

    async def at_once() -> None:
        pass

    async def test() -> None:
        await client.generate_all([request(0)], [None])
        await client.generate(request(1))
        client.gather = at_once  # episodes, whose next turns come one by one
        await client.generate_all([request(2)], [None])

    run(test)
    assert timeouts == pytest.approx([batch, single, single])


def test_engines_that_are_called_together_have_short_exchanges_only_while_requests_come() -> None:
    engine = Engine()
    engine.interval = 1.0
    client = GenerationClient([engine], limit=1)
    assert client.longest(engine) == 1.0

    async def at_once() -> None:
        pass

    client.gather = at_once
    assert client.longest(engine) == pytest.approx(0.1)


def test_a_lane_can_be_chosen_and_sessions_stay() -> None:
    engines = [Engine(), Engine()]
    client = GenerationClient(engines, limit=99)

    async def test() -> None:
        await asyncio.gather(*(client.generate(request(number), lane=1) for number in range(5)))
        await client.generate(request(5, session="s"), lane=1)
        await client.generate(request(6, session="s"))

    run(test)
    assert engines[0].seen == []


def test_an_error_of_one_request_is_its_own() -> None:
    client = GenerationClient([Engine()], limit=9)

    async def test() -> None:
        good, bad = client.generate(request(1)), client.generate(request(-1))
        results = await asyncio.gather(good, bad, return_exceptions=True)
        assert isinstance(results[0], GenerationResult)
        assert isinstance(results[1], RequestError)

    run(test)


@pytest.mark.parametrize("error", [WorkerLost("killed"), DeadlineExceeded("silent")])
def test_requests_of_a_lost_engine_go_to_the_others(error: Exception) -> None:
    lost, other = Engine(polls=10**9), Engine()
    client = GenerationClient([lost, other], limit=2)

    async def test() -> None:
        pending = [asyncio.ensure_future(client.generate(request(number), lane=0)) for number in range(5)]
        await until(lambda: lost.seen)
        lost.fail = error
        assert [int(each.token_ids) for each in await asyncio.gather(*pending)] == list(range(5))
        assert lost.lost
        client.replaced(0, Engine())
        await client.generate(request(5), lane=0)
        assert len(client.engines[0].seen) == 1  # type: ignore[attr-defined]

    run(test)


def test_without_an_engine_left_requests_fail() -> None:
    engine = Engine(polls=10**9)
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
    broken, other = Engine(polls=10**9, inline=inline), Engine()
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


def test_cancelling_and_running_out_of_time_abort_at_the_engine() -> None:
    engine = Engine(polls=10**9)
    client = GenerationClient([engine], limit=2)

    async def test() -> None:
        cancelled = asyncio.ensure_future(client.generate(request(0)))
        late = asyncio.ensure_future(client.generate(request(1), timeout=0.05))
        queued = asyncio.ensure_future(client.generate(request(2, name="queued"), timeout=0.01))
        await until(lambda: len(engine.seen) == 2)
        assert (await queued).finish_reason == "aborted"
        cancelled.cancel()
        assert (await late).finish_reason == "aborted"
        await until(lambda: not engine.held[0])
        assert sorted(engine.aborted) == ["r0", "r1"]

    run(test)


def test_results_that_arrive_after_the_end_of_an_event_loop_are_not_lost() -> None:
    """The loop ends while the engine serves; the exchange is completed by the next one, before a call of the engine."""
    engine = Engine()
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
    engine = Engine(polls=10**6)
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


@pytest.mark.parametrize("wrong", ["unknown", "twice"])
def test_a_wrong_answer_of_one_engine_keeps_the_right_ones_and_fails_the_rest(wrong: str) -> None:
    class Wrong(Engine):
        def _exchange(self, outgoing: Sequence[Outgoing], timeout: float) -> list[Incoming]:
            first, second = super()._exchange(outgoing, timeout)
            if second.results:
                extra = second.results[0]
                extra = extra if wrong == "twice" else dataclasses.replace(extra, request_id="another")
                second.results.append(extra)
            return [first, second]

    client = GenerationClient([Wrong(lanes=2)], limit=9)

    async def test() -> None:
        tasks = [client.generate(request(number), lane=number) for number in (0, 1)]
        right, failed = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)
        assert isinstance(right, GenerationResult)
        assert isinstance(failed, RLFrameworkError)
        assert "which it does not have, or did so twice" in str(failed)

    run(test)


@pytest.mark.parametrize("seed", range(8))
def test_random_cancellations_failures_and_losses(seed: int) -> None:
    draw = random.Random(seed)
    engines = [Engine(lanes=draw.randint(1, 2), polls=draw.randint(1, 4), limit=3) for _ in range(3)]
    client = GenerationClient(engines, limit=3)

    errors = {"killed", "broken"}

    async def disturb() -> None:
        for _ in range(6):
            await asyncio.sleep(0.003)
            index = draw.randrange(3)
            if client.engines[index].lost:
                client.replaced(index, Engine(lanes=client.engines[index].lanes, limit=3))
            else:
                kinds = [WorkerLost("killed"), RLFrameworkError("broken")]
                client.engines[index].fail = draw.choice(kinds)  # type: ignore[attr-defined]

    async def one(number: int) -> str:
        await asyncio.sleep(draw.random() * 0.02)
        timeout = draw.choice([None, None, 0.002])
        task = asyncio.ensure_future(client.generate(request(number), timeout=timeout))
        if draw.random() < 0.1:
            await asyncio.sleep(0.001)
            task.cancel()
        try:
            result = await task
        except asyncio.CancelledError:
            return "cancelled"
        except (WorkerLost, RLFrameworkError) as error:
            return str(error)
        assert result.finish_reason == "aborted" or int(result.token_ids) == number
        return "done"

    async def test() -> None:
        outcomes, _ = await asyncio.gather(asyncio.gather(*map(one, range(150))), disturb())
        assert set(outcomes) <= {
            "done",
            "cancelled",
            *errors,
            *(f"all generation engines are lost: {e}" for e in errors),
        }
        assert "done" in outcomes

    begun = time.monotonic()
    run(test)
    assert time.monotonic() - begun < 10


def test_nothing_is_served_while_the_engines_have_no_proven_weights():
    engine = Engine(inline=True)

    def require_ready() -> None:
        raise EngineNotReady("refit them first")

    client = GenerationClient([engine], limit=4, require_ready=require_ready)
    with pytest.raises(EngineNotReady, match="refit them first"):
        asyncio.run(client.generate(request(1)))
    assert engine.seen == []


def test_results_of_an_exchange_during_which_a_refit_fails_are_not_returned():
    engine = Engine()
    ready = [True]

    def require_ready() -> None:
        if not ready[0]:
            raise EngineNotReady("their last refit failed")

    client = GenerationClient([engine], limit=4, require_ready=require_ready)

    async def test() -> None:
        engine.gate.clear()
        task = asyncio.ensure_future(client.generate(request(1)))
        await until(lambda: engine.threads)
        ready[0] = False
        engine.gate.set()
        with pytest.raises(EngineNotReady, match="their last refit failed"):
            await task
        ready[0] = True
        assert (await client.generate(request(2))).token_ids.tolist() == [2]

    run(test)


def test_requests_that_wait_when_a_refit_fails_are_not_served():
    engine = Engine(polls=10**6)
    ready = [True]

    def require_ready() -> None:
        if not ready[0]:
            raise EngineNotReady("their last refit failed")

    client = GenerationClient([engine], limit=4, require_ready=require_ready)

    async def test() -> None:
        task = asyncio.ensure_future(client.generate(request(1)))
        await until(lambda: engine.seen)
        ready[0] = False
        with pytest.raises(EngineNotReady, match="their last refit failed"):
            await asyncio.wait_for(task, 10)

    run(test)
