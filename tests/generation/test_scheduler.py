"""Which request goes where, that each has one outcome whatever happens, and that many engines cost no more work."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from rlframework.base.errors import RequestError, RLFrameworkError, WorkerLost
from rlframework.generation.scheduler import MOST_LOSSES, Scheduler
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, Incoming, WeightSpan

LOST = WorkerLost("killed")


def request(name: str, tokens: int = 4, session: str | None = None) -> GenerationRequest:
    return GenerationRequest(name, torch.tensor([1, 2]), 0, tokens, session_id=session)


def result(name: str) -> GenerationResult:
    return GenerationResult(name, torch.tensor([7]), torch.zeros(1), "stop", (WeightSpan(0, 1, 1),))


def sent(scheduler: Scheduler, lane: int) -> list[str]:
    return [each.request_id for each in scheduler.outgoing(lane).requests]


def names(outcomes: list[tuple[str, object]]) -> list[str]:
    return [name for name, _ in outcomes]


def test_a_session_stays_on_its_lane_and_waits_for_it() -> None:
    scheduler = Scheduler(2, limit=1)
    scheduler.add(request("first", 50, session="s"))
    scheduler.add(request("second", session="s"))
    scheduler.add(request("other"))
    assert (sent(scheduler, 0), sent(scheduler, 1)) == (["first"], ["other"])
    scheduler.received(1, Incoming([result("other")]))
    assert sent(scheduler, 1) == []
    scheduler.received(0, Incoming([result("first")]))
    assert sent(scheduler, 0) == ["second"]


def test_what_waits_goes_out_in_order_of_arrival_within_the_limit() -> None:
    scheduler = Scheduler(1, limit=2)
    for name in "abcd":
        scheduler.add(request(name))
    assert sent(scheduler, 0) == ["a", "b"]
    assert names(scheduler.received(0, Incoming([result("b")], {"a": RequestError("too long")}))) == ["b", "a"]
    assert sent(scheduler, 0) == ["c", "d"]


def test_a_lost_lane_loses_nothing_while_another_is_left() -> None:
    scheduler = Scheduler(2, limit=2)
    for name in "abcd":
        scheduler.add(request(name), lane=0)
    assert sent(scheduler, 0) == ["a", "b"]
    assert scheduler.lost([0], LOST) == []
    assert sent(scheduler, 1) == ["a", "b"]
    assert scheduler.replaced([0], LOST) == []
    assert sent(scheduler, 0) == ["c", "d"]
    assert sorted(names(scheduler.lost([0, 1], LOST))) == ["a", "b", "c", "d"]
    with pytest.raises(WorkerLost, match="all generation engines are lost: killed"):
        scheduler.add(request("e"))


def test_a_request_that_loses_every_engine_fails_instead_of_ending_them_all() -> None:
    scheduler = Scheduler(9, limit=2)
    scheduler.add(request("poison"))
    for count in range(1, MOST_LOSSES + 1):
        lane = next(lane for lane in range(9) if sent(scheduler, lane))
        assert names(scheduler.lost([lane], LOST)) == (["poison"] if count == MOST_LOSSES else [])
    scheduler.add(request("poison"))


def test_ids_in_use_and_results_of_others_are_errors() -> None:
    scheduler = Scheduler(1, limit=1)
    scheduler.add(request("a"))
    with pytest.raises(RequestError, match="'a' is in use"):
        scheduler.add(request("a"))
    with pytest.raises(RLFrameworkError, match="'a', which it does not have"):
        scheduler.received(0, Incoming([result("a")]))  # not sent yet


def test_time_is_up_in_the_queue_and_at_an_engine() -> None:
    scheduler = Scheduler(1, limit=1)
    scheduler.add(request("a"))
    scheduler.add(request("b"))
    assert sent(scheduler, 0) == ["a"]
    ((name, aborted),) = scheduler.expire("b")
    assert isinstance(aborted, GenerationResult)
    assert (name, aborted.finish_reason, len(aborted.token_ids), aborted.spans) == ("b", "aborted", 0, ())
    assert scheduler.expire("a") == scheduler.expire("b") == []
    assert scheduler.outgoing(0).abort_ids == ("a",)
    assert names(scheduler.lost([0], LOST)) == ["a"]


@pytest.mark.parametrize("seed", range(40))
def test_every_request_has_one_outcome_or_was_cancelled(seed: int) -> None:
    """Random schedules of arriving, finishing, rejecting, failing, cancelling, expiring, losing and replacing."""
    draw = random.Random(seed)
    lanes, limit = draw.randint(1, 4), draw.randint(1, 5)
    scheduler = Scheduler(lanes, limit)
    engines: list[dict[str, bool]] = [{} for _ in range(lanes)]  # what each engine has, and whether it is aborted
    alive = [True] * lanes
    open_, done, cancelled, added = set[str](), list[str](), set[str](), 0

    def settle(outcomes: list[tuple[str, object]]) -> None:
        for name, _ in outcomes:
            assert name in open_, f"{name} has a second outcome, or was cancelled"
            open_.remove(name)
            done.append(name)

    def exchange(lane: int) -> None:
        outgoing = scheduler.outgoing(lane)
        engine = engines[lane]
        engine |= dict.fromkeys((each.request_id for each in outgoing.requests), False)
        for name in outgoing.abort_ids:
            engine[name] = True
        assert len(engine) <= limit + len([name for name in engine if name in failed])
        if draw.random() < 0.1:
            failed.update(engine)
            settle(scheduler.failed([lane], RLFrameworkError("out of memory")))
            return
        finished = [name for name, aborted in engine.items() if aborted or draw.random() < 0.4]
        rejected = {name: RequestError("no") for name in finished if draw.random() < 0.1}
        for name in finished:
            del engine[name]
        settle(scheduler.received(lane, Incoming([result(n) for n in finished if n not in rejected], rejected)))

    failed = set[str]()
    for _ in range(200):
        action, lane = draw.random(), draw.randrange(lanes)
        if action < 0.4 and any(alive):
            name, added = f"r{added}", added + 1
            session = f"s{draw.randrange(3)}" if draw.random() < 0.3 else None
            open_.add(name)
            scheduler.add(request(name, draw.randint(1, 9), session), draw.choice([None, lane]))
        elif action < 0.5 and open_:
            name = draw.choice(sorted(open_))
            open_.remove(name)
            cancelled.add(name)
            scheduler.cancel(name)
        elif action < 0.6 and open_:
            settle(scheduler.expire(draw.choice(sorted(open_))))
        elif action < 0.65 and alive[lane]:
            alive[lane], engines[lane] = False, {}
            settle(scheduler.lost([lane], LOST))
        elif action < 0.7 and not alive[lane]:
            alive[lane] = True
            settle(scheduler.replaced([lane], LOST))
        elif alive[lane]:
            exchange(lane)
    for lane in range(lanes):
        if not alive[lane]:
            settle(scheduler.replaced([lane], LOST))
    for _ in range(2000):
        for lane in range(lanes):
            exchange(lane)
        if not any(map(scheduler.busy, range(lanes))):
            break
    assert not open_
    assert len(done) == len(set(done)) == added - len(cancelled)
    assert all(scheduler.in_flight(lane) == (0, 0) for lane in range(lanes))


def answer(scheduler: Scheduler, lane: int) -> int:
    """Answer all that the lane has been sent now; return how many those are."""
    ids = [each.request_id for each in scheduler.outgoing(lane).requests]
    return len(scheduler.received(lane, Incoming([result(name) for name in ids])))


class Counted(list[Any]):
    """A list that counts how many of its items were looked at."""

    looks = 0

    def __getitem__(self, index: Any) -> Any:
        self.looks += 1
        return super().__getitem__(index)

    def __iter__(self) -> Any:
        self.looks += len(self)
        return super().__iter__()


def looks_per_request(lanes: int) -> float:
    scheduler = Scheduler(lanes, limit=4)
    counted = scheduler._lanes = Counted(scheduler._lanes)
    for number in range(6 * lanes):  # a third of them waits
        scheduler.add(request(str(number), 1 + number % 7))
    answered = 0
    while done := sum(answer(scheduler, lane) for lane in range(lanes)):
        answered += done
    assert answered == 6 * lanes
    return counted.looks / answered


@pytest.mark.slow
def test_the_work_for_a_request_does_not_grow_with_the_engines() -> None:
    assert looks_per_request(512) < 1.2 * looks_per_request(32)


def test_the_first_lane_with_the_fewest_tokens_is_chosen_after_any_history() -> None:
    drawn, scheduler, lanes = random.Random(0), Scheduler(6, limit=3), range(6)
    for number in range(3000):
        states = [scheduler.in_flight(lane) for lane in lanes]
        free = [lane for lane in lanes if states[lane][0] < 3 and lane not in scheduler._lost]
        if free:
            scheduler.add(request(str(number), drawn.randint(1, 3)))
            changed = [lane for lane in lanes if scheduler.in_flight(lane) != states[lane]]
            assert changed == [min(free, key=lambda lane: states[lane][1])]
        event = drawn.random()
        if event < 0.02:
            scheduler.lost([drawn.randrange(5)], WorkerLost("killed"))  # never all: the last one stays
        elif event < 0.06 and scheduler._lost:
            scheduler.replaced([min(scheduler._lost)], WorkerLost("killed"))
        elif event < 0.3 or not free:
            answer(scheduler, drawn.choice(lanes))
