"""Broken worker groups: wrong results, and wrong reports of failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlframework.base.errors import DeadlineExceeded, RLFrameworkError, WorkerError, WorkerLost
from rlframework_conformance.mutants.mutant import Mutant
from rlframework_conformance.mutants.worker_group.replacements import TWO, Break, with_methods


def broken_results(change: Callable[[Any, Callable[[], list[Any]]], list[Any]]) -> Break:
    """Break `get_all_worker_results`: it returns `change(group, wait)`, where `wait()` returns the correct results."""

    def break_it(part: Any) -> type:
        def get(self: Any, future: Any) -> list[Any]:
            return change(self, lambda: part.get_all_worker_results(self, future))

        return with_methods(part, get_all_worker_results=get)

    return break_it


def failures_as_none(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """Return None for each result of a failed call."""
    try:
        return wait()
    except Exception:  # noqa: BLE001 - the bug
        return [None] * group.sharding.size


def first_line_only(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """Keep only the first line of the error message, without the traceback."""
    try:
        return wait()
    except WorkerError as error:
        message = str(error).splitlines()[0]
    raise WorkerError(message)


def all_as_worker_errors(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """Raise every error as a WorkerError."""
    try:
        return wait()
    except RLFrameworkError as error:
        raise WorkerError(str(error)) from error


def wrong_rank(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """Attribute failures of rank 1 to rank 0."""
    try:
        return wait()
    except RLFrameworkError as error:
        raise type(error)(str(error).replace("rank 1", "rank 0")) from None


def deaths_as_missed_deadlines(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """Report the death of a worker as a missed deadline."""
    try:
        return wait()
    except WorkerError as error:
        if "died" in str(error):
            raise DeadlineExceeded("no answer from rank 1") from None
        raise


def deaths_as_failures(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """Report the death of a worker as an ordinary failure."""
    try:
        return wait()
    except WorkerLost as error:
        raise WorkerError(str(error)) from None


def failures_as_deaths(group: Any, wait: Callable[[], list[Any]]) -> list[Any]:
    """Report an exception in a worker as its death."""
    try:
        return wait()
    except WorkerError as error:
        raise WorkerLost(str(error)) from None


def only_last_results(part: Any) -> type:
    """Return the results of the last call for any future."""

    def single(self: Any, method_name: str, **given: Any) -> Any:
        self.last, self.results = part.run_all_workers_single_data(self, method_name, **given), None
        return self.last

    def get(self: Any, future: Any) -> list[Any]:
        if self.results is None:
            self.results = part.get_all_worker_results(self, self.last)
        return list(self.results)

    return with_methods(part, run_all_workers_single_data=single, get_all_worker_results=get)


def restarting(part: Any) -> type:
    """Silently start new workers after a failure."""

    def init(self: Any, *args: Any, **given: Any) -> None:
        self.start_arguments = (args, given)
        part.__init__(self, *args, **given)

    def get(self: Any, future: Any) -> list[Any]:
        try:
            return list(part.get_all_worker_results(self, future))
        except WorkerError:
            part.__init__(self, *self.start_arguments[0], **self.start_arguments[1])
            raise

    return with_methods(part, __init__=init, get_all_worker_results=get)


MUTANTS = (
    Mutant(
        "order_of_completion",
        "Results do not come back in rank order.",
        ("test_results_are_in_the_order_of_ranks",),
        broken_results(lambda group, wait: wait()[::-1]),
        TWO,
    ),
    Mutant(
        "one_slot_for_answers",
        "A second call overwrites the results of the first.",
        ("test_futures_may_be_awaited_in_any_order",),
        only_last_results,
    ),
    Mutant(
        "failure_swallowed",
        "A failed call returns None for every result.",
        (
            "test_one_failing_rank_fails_the_call_at_once",
            "test_an_answer_that_cannot_be_sent_fails_the_call",
            "test_a_group_is_not_usable_after_a_failure",
        ),
        broken_results(failures_as_none),
        TWO,
    ),
    Mutant(
        "no_traceback",
        "The error of a failed call lacks the worker's traceback.",
        ("test_a_failure_has_the_workers_own_traceback",),
        broken_results(first_line_only),
    ),
    Mutant(
        "error_class_lost",
        "An RLFrameworkError raised by a worker comes back as a WorkerError.",
        ("test_an_error_of_rlframework_comes_back_as_its_own_class",),
        broken_results(all_as_worker_errors),
    ),
    Mutant(
        "wrong_rank_blamed",
        "Every failure is attributed to rank 0.",
        (
            "test_one_failing_rank_fails_the_call_at_once",
            "test_a_rank_that_dies_fails_the_call_at_once",
            "test_a_rank_that_hangs_meets_the_deadline",
        ),
        broken_results(wrong_rank),
        TWO,
    ),
    Mutant(
        "death_is_silence",
        "A worker that died is reported as one that has not answered yet.",
        ("test_a_rank_that_dies_fails_the_call_at_once",),
        broken_results(deaths_as_missed_deadlines),
        TWO,
    ),
    Mutant(
        "death_is_a_failure",
        "The death of a worker does not raise WorkerLost, so no run restarts after it.",
        ("test_a_rank_that_dies_fails_the_call_at_once",),
        broken_results(deaths_as_failures),
        TWO,
    ),
    Mutant(
        "failure_is_a_death",
        "An exception in a worker raises WorkerLost, so the run retries what will fail again.",
        ("test_one_failing_rank_fails_the_call_at_once",),
        broken_results(failures_as_deaths),
        TWO,
    ),
    Mutant(
        "restarts_in_silence",
        "After a failure the group silently starts new workers.",
        ("test_a_group_is_not_usable_after_a_failure",),
        restarting,
        TWO,
    ),
)
