"""The scheduler's work for a request does not grow with the engines, and its choices are those of a full search."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from rlframework.base.errors import WorkerLost
from rlframework.generation.scheduler import Scheduler
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, Incoming

PROMPT, NOTHING = torch.tensor([1, 2]), torch.empty(0)


def request(number: int, tokens: int = 4) -> GenerationRequest:
    return GenerationRequest(str(number), PROMPT, 0, tokens)


def answer(scheduler: Scheduler, lane: int) -> int:
    """Answer all that the lane has been sent now; return how many those are."""
    ids = [each.request_id for each in scheduler.outgoing(lane).requests]
    results = [GenerationResult(name, NOTHING.long(), NOTHING, "stop", ()) for name in ids]
    return len(scheduler.received(lane, Incoming(results)))


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
        scheduler.add(request(number, 1 + number % 7))
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
            scheduler.add(request(number, drawn.randint(1, 3)))
            changed = [lane for lane in lanes if scheduler.in_flight(lane) != states[lane]]
            assert changed == [min(free, key=lambda lane: states[lane][1])]
        event = drawn.random()
        if event < 0.02:
            scheduler.lost([drawn.randrange(5)], WorkerLost("killed"))  # never all: the last one stays
        elif event < 0.06 and scheduler._lost:
            scheduler.replaced([min(scheduler._lost)], WorkerLost("killed"))
        elif event < 0.3 or not free:
            answer(scheduler, drawn.choice(lanes))
