"""Broken worker groups: wrong results, and wrong reports of failures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlframework.base.errors import DeadlineExceeded, RLFrameworkError, WorkerError, WorkerLost
from rlframework.interfaces.worker_group import WorkerGroup
from rlframework_conformance.mutants.mutant import around, mutant
from rlframework_conformance.mutants.worker_group import TWO


def _errors(change: Callable[[RLFrameworkError], RLFrameworkError]) -> Callable[[Any], Any]:
    """Decorate a change of the error that a call fails with."""

    @around(WorkerGroup.get_all_worker_results)
    def wait_or_raise(wait: Any, _: Any, future: Any) -> Any:
        try:
            return wait(future)
        except RLFrameworkError as error:
            raise change(error) from None

    return wait_or_raise


@mutant("order_of_completion", "Results do not come back in rank order.", layout=TWO)
@around(WorkerGroup.get_all_worker_results)
def _order_of_completion(wait: Any, _: Any, future: Any) -> Any:
    return wait(future)[::-1]


@mutant("one_slot_for_answers", "A second call overwrites the results of the first.")
@around(WorkerGroup.run_all_workers_single_data, WorkerGroup.get_all_worker_results)
def _one_slot_for_answers(call: Any, group: Any, called: Any, **keywords: Any) -> Any:
    if isinstance(called, str):
        group.last, group.results = call(called, **keywords), None
        return group.last
    if group.results is None:
        group.results = call(group.last)
    return list(group.results)


@mutant("failure_swallowed", "A failed call returns None for every result.", layout=TWO)
@around(WorkerGroup.get_all_worker_results)
def _failure_swallowed(wait: Any, group: Any, future: Any) -> Any:
    try:
        return wait(future)
    except Exception:  # noqa: BLE001 - the bug
        return [None] * group.sharding.size


@mutant("no_traceback", "The error of a failed call lacks the worker's traceback.")
@_errors
def _no_traceback(error: RLFrameworkError) -> RLFrameworkError:
    return WorkerError(str(error).splitlines()[0]) if isinstance(error, WorkerError) else error


@mutant("error_class_lost", "An RLFrameworkError raised by a worker comes back as a WorkerError.")
@_errors
def _error_class_lost(error: RLFrameworkError) -> RLFrameworkError:
    return WorkerError(str(error))


@mutant("wrong_rank_blamed", "Every failure is attributed to rank 0.", layout=TWO)
@_errors
def _wrong_rank_blamed(error: RLFrameworkError) -> RLFrameworkError:
    return type(error)(str(error).replace("rank 1", "rank 0"))


@mutant("death_is_silence", "A worker that died is reported as one that has not answered yet.", layout=TWO)
@_errors
def _death_is_silence(error: RLFrameworkError) -> RLFrameworkError:
    return DeadlineExceeded("no answer from rank 1") if "died" in str(error) else error


@mutant(
    "death_is_a_failure", "The death of a worker does not raise WorkerLost, so no run restarts after it.", layout=TWO
)
@_errors
def _death_is_a_failure(error: RLFrameworkError) -> RLFrameworkError:
    return WorkerError(str(error)) if isinstance(error, WorkerLost) else error


@mutant(
    "failure_is_a_death",
    "An exception in a worker raises WorkerLost, so the run retries what will fail again.",
    layout=TWO,
)
@_errors
def _failure_is_a_death(error: RLFrameworkError) -> RLFrameworkError:
    return WorkerLost(str(error)) if isinstance(error, WorkerError) else error


@mutant("restarts_in_silence", "After a failure the group silently starts new workers.", layout=TWO)
@around(WorkerGroup.__init__)
def _restarts_in_silence(start: Any, group: Any, *args: Any, **keywords: Any) -> None:
    def wait_or_restart(future: Any) -> Any:
        try:
            return wait(future)
        except WorkerError:
            start(*args, **keywords)
            raise

    start(*args, **keywords)
    wait, group.get_all_worker_results = group.get_all_worker_results, wait_or_restart
