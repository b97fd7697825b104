"""Schedulers with one fault each, of back-pressure, cancellation and lost engines: the tests of the scheduler fail."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import test_scheduler

from rlframework.base.errors import RLFrameworkError
from rlframework.generation.scheduler import Scheduler


class NoLimit(Scheduler):
    """Sends an engine everything at once."""

    def __init__(self, lanes, limit):
        super().__init__(lanes, 1000)


class CancelIgnored(Scheduler):
    """Completes cancelled requests."""

    def cancel(self, request_id): ...


class CancelledAtTheClientOnly(Scheduler):
    """Forgets to abort cancelled requests, and expired ones, at their engine."""

    def outgoing(self, lane):
        return dataclasses.replace(super().outgoing(lane), abort_ids=())


class CancelledReturn(Scheduler):
    """Expires a request instead of cancelling it, so that it comes back."""

    def cancel(self, request_id):
        self.expire(request_id)


class LostRequests(Scheduler):
    """Drops the requests of a lost engine."""

    def lost(self, lanes, error):
        for lane in lanes:
            for request in super().outgoing(lane).requests:
                self.cancel(request.request_id)
            self.failed([lane], error)
        return super().lost(lanes, error)


class FailedWithTheEngine(Scheduler):
    """Fails the requests of a lost engine instead of sending them to another."""

    def lost(self, lanes, error):
        return [*self.failed(lanes, error), *super().lost(lanes, error)]


class LostIsUsed(Scheduler):
    """Goes on to use a lost engine."""

    def lost(self, lanes, error):
        outcomes = super().lost(lanes, error)
        self.replaced(lanes, error)
        return outcomes


RANDOM = "test_every_request_has_one_outcome_or_was_cancelled"
LOSS = "test_a_lost_lane_loses_nothing_while_another_is_left"
TIME = "test_time_is_up_in_the_queue_and_at_an_engine"
FAULTS: list[tuple[type[Scheduler], str]] = [
    (NoLimit, RANDOM),
    (NoLimit, "test_what_waits_goes_out_in_order_of_arrival_within_the_limit"),
    (CancelIgnored, RANDOM),
    (CancelledAtTheClientOnly, TIME),
    (CancelledReturn, RANDOM),
    (LostRequests, RANDOM),
    (FailedWithTheEngine, LOSS),
    (LostIsUsed, LOSS),
]


@pytest.mark.parametrize(("fault", "test"), FAULTS, ids=lambda value: getattr(value, "__name__", value))
def test_faults_are_caught(fault: type[Scheduler], test: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(test_scheduler, "Scheduler", fault)
    run: Callable[..., None] = getattr(test_scheduler, test)
    assert any(fails(run, seed) for seed in range(40)) if test == RANDOM else fails(run)


def fails(run: Callable[..., None], *arguments: int) -> bool:
    try:
        run(*arguments)
    except (AssertionError, RLFrameworkError, ValueError, pytest.fail.Exception):
        return True
    return False
