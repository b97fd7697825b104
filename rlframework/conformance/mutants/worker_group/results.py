"""Broken worker groups: what comes back, and how failures are told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlframework.conformance.mutants.mutant import Mutant
from rlframework.conformance.mutants.worker_group.base import TWO, Break, with_methods
from rlframework.errors import DeadlineExceeded, RLFrameworkError, WorkerError, WorkerLost


def awaiting(change: Callable[[Any, Callable[[], list[Any]]], list[Any]]) -> Break:
    """Results are what `change(group, wait)` gives, where `wait()` gives the right ones."""

    def break_it(part: Any) -> type:
        def get(self: Any, future: Any) -> list[Any]:
            return change(self, lambda: part.get_all_worker_results(self, future))

        return with_methods(part, get_all_worker_results=get)

    return break_it


def swallowed(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """None for the results of a call that failed."""
    try:
        return wait()
    except Exception:  # noqa: BLE001 - this is the bug
        return [None] * group.sharding.size


def first_line_only(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """A failure without the rest of its message."""
    try:
        return wait()
    except WorkerError as error:
        message = str(error).splitlines()[0]
    raise WorkerError(message)


def all_worker_errors(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """Errors without their class."""
    try:
        return wait()
    except RLFrameworkError as error:
        raise WorkerError(str(error)) from error


def wrong_rank(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """Failures of rank 1 are told as those of rank 0."""
    try:
        return wait()
    except RLFrameworkError as error:
        raise type(error)(str(error).replace("rank 1", "rank 0")) from None


def deaths_as_silence(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """A death is told as a deadline."""
    try:
        return wait()
    except WorkerError as error:
        if "died" in str(error):
            raise DeadlineExceeded("no answer from rank 1") from None
        raise


def deaths_as_failures(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """A death is told as any other failure."""
    try:
        return wait()
    except WorkerLost as error:
        raise WorkerError(str(error)) from None


def failures_as_deaths(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """What a worker raises is told as its death."""
    try:
        return wait()
    except WorkerError as error:
        raise WorkerLost(str(error)) from None


def one_slot(part: Any) -> type:
    """The answers of the last call, whichever future is awaited."""

    def single(self: Any, method_name: str, **given: Any) -> Any:
        self.last, self.results = part.run_all_workers_single_data(self, method_name, **given), None
        return self.last

    def get(self: Any, future: Any) -> list[Any]:
        if self.results is None:
            self.results = part.get_all_worker_results(self, self.last)
        return list(self.results)

    return with_methods(part, run_all_workers_single_data=single, get_all_worker_results=get)


def restarting(part: Any) -> type:
    """After a failure it starts new workers in silence."""

    def init(self: Any, *args: Any, **given: Any) -> None:
        self.begun = (args, given)
        part.__init__(self, *args, **given)

    def get(self: Any, future: Any) -> list[Any]:
        try:
            return list(part.get_all_worker_results(self, future))
        except WorkerError:
            part.__init__(self, *self.begun[0], **self.begun[1])
            raise

    return with_methods(part, __init__=init, get_all_worker_results=get)


MUTANTS = (
    Mutant(
        "order_of_completion",
        "results come in another order than ranks",
        ("test_results_come_in_the_order_of_ranks_whoever_is_first",),
        awaiting(lambda group, wait: wait()[::-1]),
        TWO,
    ),
    Mutant(
        "one_slot_for_answers",
        "a second call overwrites the answers of the first",
        ("test_futures_may_be_awaited_in_any_order",),
        one_slot,
    ),
    Mutant(
        "failure_swallowed",
        "a failed call gives None for its results",
        (
            "test_one_failing_rank_fails_the_call_at_once",
            "test_an_answer_that_cannot_be_sent_fails_the_call",
            "test_a_group_is_not_usable_after_a_failure",
        ),
        awaiting(swallowed),
        TWO,
    ),
    Mutant(
        "no_traceback",
        "a failure is told without the worker's traceback",
        ("test_a_failure_has_the_workers_own_traceback",),
        awaiting(first_line_only),
    ),
    Mutant(
        "error_class_lost",
        "an error of rlframework's comes back as a WorkerError",
        ("test_an_error_of_rlframework_comes_back_as_its_own_class",),
        awaiting(all_worker_errors),
    ),
    Mutant(
        "wrong_rank_blamed",
        "a failure is told as that of rank 0, whoever failed",
        (
            "test_one_failing_rank_fails_the_call_at_once",
            "test_a_rank_that_dies_fails_the_call_at_once",
            "test_a_rank_that_hangs_meets_the_deadline",
        ),
        awaiting(wrong_rank),
        TWO,
    ),
    Mutant(
        "death_is_silence",
        "a worker that died counts as one that has not answered yet",
        ("test_a_rank_that_dies_fails_the_call_at_once",),
        awaiting(deaths_as_silence),
        TWO,
    ),
    Mutant(
        "death_is_a_failure",
        "a worker that died is no WorkerLost, so that no run goes on after it",
        ("test_a_rank_that_dies_fails_the_call_at_once",),
        awaiting(deaths_as_failures),
        TWO,
    ),
    Mutant(
        "failure_is_a_death",
        "what a worker raises is a WorkerLost, so that a run tries again what will fail again",
        ("test_one_failing_rank_fails_the_call_at_once",),
        awaiting(failures_as_deaths),
        TWO,
    ),
    Mutant(
        "restarts_in_silence",
        "after a failure the group goes on with new workers",
        ("test_a_group_is_not_usable_after_a_failure",),
        restarting,
        TWO,
    ),
)
