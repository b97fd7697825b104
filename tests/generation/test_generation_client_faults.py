"""The asynchronous client when requests, engines and refits fail: which requests fail, and which are completed."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Sequence

import pytest
from stub_engines import FakeEngine, request, run, until

from rlframework.base.errors import DeadlineExceeded, EngineNotReady, RequestError, RLFrameworkError, WorkerLost
from rlframework.generation.client import GenerationClient
from rlframework.interfaces.generation import GenerationResult, Incoming, Outgoing


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


def test_an_error_of_one_request_is_its_own() -> None:
    client = GenerationClient([FakeEngine()], limit=9)

    async def test() -> None:
        good, bad = client.generate(request(1)), client.generate(request(-1))
        results = await asyncio.gather(good, bad, return_exceptions=True)
        assert isinstance(results[0], GenerationResult)
        assert isinstance(results[1], RequestError)

    run(test)


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


@pytest.mark.parametrize("wrong", ["unknown", "twice"])
def test_a_wrong_answer_of_one_engine_keeps_the_right_ones_and_fails_the_rest(wrong: str) -> None:
    class Wrong(FakeEngine):
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
        right, failed = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(right, GenerationResult)
        assert isinstance(failed, RLFrameworkError)
        assert "which it does not have, or did so twice" in str(failed)

    run(test)


@pytest.mark.parametrize("seed", range(8))
def test_random_cancellations_failures_and_losses(seed: int) -> None:
    draw = random.Random(seed)
    engines = [FakeEngine(lanes=draw.randint(1, 2), polls=draw.randint(1, 4), limit=3) for _ in range(3)]
    client = GenerationClient(engines, limit=3)

    errors = {"killed", "broken"}

    async def disturb() -> None:
        for _ in range(6):
            await asyncio.sleep(0.003)
            index = draw.randrange(3)
            if client.engines[index].lost:
                client.replaced(index, FakeEngine(lanes=client.engines[index].lanes, limit=3))
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

    run(test)


def test_nothing_is_served_while_the_engines_have_no_proven_weights():
    engine = FakeEngine(inline=True)

    def require_ready() -> None:
        raise EngineNotReady("refit them first")

    client = GenerationClient([engine], limit=4, require_ready=require_ready)
    with pytest.raises(EngineNotReady, match="refit them first"):
        asyncio.run(client.generate(request(1)))
    assert engine.seen == []


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


def test_requests_that_wait_when_a_refit_fails_are_not_served():
    engine = FakeEngine(polls=10**6)
    weights = Weights()
    client = GenerationClient([engine], limit=4, require_ready=weights.require_ready)

    async def test() -> None:
        task = asyncio.ensure_future(client.generate(request(1)))
        await until(lambda: engine.seen)
        weights.proven = False
        with pytest.raises(EngineNotReady, match="their last refit failed"):
            await task

    run(test)
