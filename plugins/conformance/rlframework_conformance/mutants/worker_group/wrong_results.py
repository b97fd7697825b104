"""Broken worker groups: wrong results, and wrong reports of failures."""

from __future__ import annotations

from typing import Any

from rlframework.base.errors import DeadlineExceeded, RLFrameworkError, WorkerError, WorkerLost
from rlframework.interfaces.worker_group import WorkerGroup
from rlframework_conformance.mutants.mutant import around, mutant
from rlframework_conformance.mutants.worker_group import TWO

_FAILS = "test_one_failing_rank_fails_the_call_at_once"
_DIES = "test_a_rank_that_dies_fails_the_call_at_once"
_UNUSABLE = "test_a_group_is_not_usable_after_a_failure"
_ORDER = "test_results_are_in_the_order_of_ranks"
_ANY_ORDER = "test_futures_may_be_awaited_in_any_order"
_UNSENDABLE = "test_an_answer_that_cannot_be_sent_fails_the_call"
_TRACEBACK = "test_a_failure_has_the_workers_own_traceback"
_CLASS = "test_an_error_of_rlframework_comes_back_as_its_own_class"
_HANGS = "test_a_rank_that_hangs_meets_the_deadline"


@mutant("order_of_completion", "Results do not come back in rank order.", _ORDER, layout=TWO)
@around(WorkerGroup.get_all_worker_results)
def _order_of_completion(wait: Any, _: Any, future: Any) -> Any:
    return wait(future)[::-1]


@mutant("one_slot_for_answers", "A second call overwrites the results of the first.", _ANY_ORDER)
@around(WorkerGroup.run_all_workers_single_data, WorkerGroup.get_all_worker_results)
def _one_slot_for_answers(call: Any, group: Any, called: Any, **given: Any) -> Any:
    if isinstance(called, str):
        group.last, group.results = call(called, **given), None
        return group.last
    if group.results is None:
        group.results = call(group.last)
    return list(group.results)


@mutant("failure_swallowed", "A failed call returns None for every result.", _FAILS, _UNSENDABLE, _UNUSABLE, layout=TWO)
@around(WorkerGroup.get_all_worker_results)
def _failure_swallowed(wait: Any, group: Any, future: Any) -> Any:
    try:
        return wait(future)
    except Exception:  # noqa: BLE001 - the bug
        return [None] * group.sharding.size


@mutant("no_traceback", "The error of a failed call lacks the worker's traceback.", _TRACEBACK)
@around(WorkerGroup.get_all_worker_results)
def _no_traceback(wait: Any, _: Any, future: Any) -> Any:
    try:
        return wait(future)
    except WorkerError as error:
        message = str(error).splitlines()[0]
    raise WorkerError(message)


@mutant("error_class_lost", "An RLFrameworkError raised by a worker comes back as a WorkerError.", _CLASS)
@around(WorkerGroup.get_all_worker_results)
def _error_class_lost(wait: Any, _: Any, future: Any) -> Any:
    try:
        return wait(future)
    except RLFrameworkError as error:
        raise WorkerError(str(error)) from error


@mutant("wrong_rank_blamed", "Every failure is attributed to rank 0.", _FAILS, _DIES, _HANGS, layout=TWO)
@around(WorkerGroup.get_all_worker_results)
def _wrong_rank_blamed(wait: Any, _: Any, future: Any) -> Any:
    try:
        return wait(future)
    except RLFrameworkError as error:
        raise type(error)(str(error).replace("rank 1", "rank 0")) from None


@mutant("death_is_silence", "A worker that died is reported as one that has not answered yet.", _DIES, layout=TWO)
@around(WorkerGroup.get_all_worker_results)
def _death_is_silence(wait: Any, _: Any, future: Any) -> Any:
    try:
        return wait(future)
    except WorkerError as error:
        if "died" in str(error):
            raise DeadlineExceeded("no answer from rank 1") from None
        raise


@mutant(
    "death_is_a_failure",
    "The death of a worker does not raise WorkerLost, so no run restarts after it.",
    _DIES,
    layout=TWO,
)
@around(WorkerGroup.get_all_worker_results)
def _death_is_a_failure(wait: Any, _: Any, future: Any) -> Any:
    try:
        return wait(future)
    except WorkerLost as error:
        raise WorkerError(str(error)) from None


@mutant(
    "failure_is_a_death",
    "An exception in a worker raises WorkerLost, so the run retries what will fail again.",
    _FAILS,
    layout=TWO,
)
@around(WorkerGroup.get_all_worker_results)
def _failure_is_a_death(wait: Any, _: Any, future: Any) -> Any:
    try:
        return wait(future)
    except WorkerError as error:
        raise WorkerLost(str(error)) from None


@mutant("restarts_in_silence", "After a failure the group silently starts new workers.", _UNUSABLE, layout=TWO)
@around(WorkerGroup.__init__)
def _restarts_in_silence(start: Any, group: Any, *args: Any, **given: Any) -> None:
    def wait_or_restart(future: Any) -> Any:
        try:
            return wait(future)
        except WorkerError:
            start(*args, **given)
            raise

    start(*args, **given)
    wait, group.get_all_worker_results = group.get_all_worker_results, wait_or_restart
