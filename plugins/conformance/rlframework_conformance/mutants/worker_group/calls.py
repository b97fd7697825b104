"""Broken worker groups: wrong arguments, calls of the wrong workers, wrong results, and wrong reports of failures."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from rlframework.base.errors import DeadlineExceeded, RLFrameworkError, WorkerError, WorkerLost
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.worker_group import WorkerGroup
from rlframework_conformance.mutants.mutant import around, mutant, result, without
from rlframework_conformance.mutants.worker_group import TWO

_ONE = WorkerGroup.run_single_worker_single_data
_SINGLE = WorkerGroup.run_all_workers_single_data
_MULTIPLE = WorkerGroup.run_all_workers_multiple_data
_SHARDED = WorkerGroup.run_all_workers_sharded_data
_RESULTS = WorkerGroup.get_all_worker_results


def _values(method: Callable[..., Any], kind: type, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Change each value of a `kind` that `method` gets by keyword."""
    return around(method)(
        lambda run, _, *args, **keywords: run(
            *args, **{name: change(value) if isinstance(value, kind) else value for name, value in keywords.items()}
        )
    )


def _errors(kind: type[RLFrameworkError], change: Callable[[Any], RLFrameworkError]) -> Callable[[Any], Any]:
    """Change the error of a `kind` that a call fails with."""

    @around(_RESULTS)
    def wait_or_raise(wait: Any, _: Any, future: Any) -> Any:
        try:
            return wait(future)
        except kind as error:
            raise change(error) from None

    return wait_or_raise


def _none_if_unsendable(value: Any) -> Any:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - the bug: any error goes unnoticed
        return None
    return value


MUTANTS = (
    mutant("common_lost", "The arguments common to all workers are dropped.", layout=TWO)(
        without(_SHARDED, "common_kwargs")
    ),
    mutant("replicas_not_called", "Only coordinate 0 of a replicated axis is called.", layout=TWO)(
        without(_SHARDED, "replicate_on_axes")
    ),
    mutant("replicated_outputs_all_kept", "A replicated output comes back once per replica.", layout=TWO)(
        without(_SHARDED, "output_is_replicated")
    ),
    mutant("no_dummy_calls", "Workers along a free axis get no dummy call.", layout=TWO)(
        without(_SHARDED, "make_dummy_calls_to_free_axes")
    ),
    mutant("rank_0_only_ignored", "All ranks run what only rank 0 should run.", layout=TWO)(
        without(_SINGLE, "run_rank_0_only_axes")
    ),
    mutant("entries_reversed", "Workers get their entries in reverse order.", layout=TWO)(
        _values(_MULTIPLE, list, lambda value: value[::-1])
    ),
    mutant("entries_not_counted", "Surplus entries are silently dropped.", layout=TWO)(
        _values(_MULTIPLE, list, lambda value: value[:2])
    ),
    mutant("shares_not_counted", "Surplus shares are silently dropped.", layout=TWO)(
        _values(_SHARDED, list, lambda value: value[:2] if value and isinstance(value[0], str) else value)
    ),
    mutant("batch_becomes_a_dict", "A batch arrives as a plain dictionary.")(_values(_SINGLE, BatchedDataDict, dict)),
    mutant("messages_cut", "A tensor larger than a buffer arrives truncated.", layout=TWO)(
        _values(
            _SHARDED,
            list,
            lambda value: [one[: 2**20] if isinstance(one, torch.Tensor) else one for one in value],
        )
    ),
    mutant("unsendable_dropped", "Arguments that cannot be pickled arrive as None.", layout=TWO)(
        _values(_SINGLE, object, _none_if_unsendable)
    ),
    mutant("classes_by_reference", "Objects of a class that only the driver's program has cannot be sent.", layout=TWO)(
        _values(_SINGLE, object, lambda value: pickle.loads(pickle.dumps(value)))  # noqa: S301 - pickled here
    ),
    mutant("callbacks_lost", "A callback is promised and never called.")(
        around(WorkerGroup.when_done)(lambda *_: True)
    ),
    mutant("order_of_completion", "Results do not come back in rank order.", layout=TWO)(
        result(_RESULTS, lambda results: results[::-1])
    ),
    mutant("no_traceback", "The error of a failed call lacks the worker's traceback.")(
        _errors(WorkerError, lambda error: WorkerError(str(error).splitlines()[0]))
    ),
    mutant("error_class_lost", "An RLFrameworkError raised by a worker comes back as a WorkerError.")(
        _errors(RLFrameworkError, lambda error: WorkerError(str(error)))
    ),
    mutant("wrong_rank_blamed", "Every failure is attributed to rank 0.", layout=TWO)(
        _errors(RLFrameworkError, lambda error: type(error)(str(error).replace("rank 1", "rank 0")))
    ),
    mutant("death_is_silence", "A worker that died is reported as one that has not answered yet.", layout=TWO)(
        _errors(
            RLFrameworkError, lambda error: DeadlineExceeded("no answer from rank 1") if "died" in str(error) else error
        )
    ),
    mutant(
        "death_is_a_failure",
        "The death of a worker does not raise WorkerLost, so no run restarts after it.",
        layout=TWO,
    )(_errors(WorkerLost, lambda error: WorkerError(str(error)))),
    mutant(
        "failure_is_a_death",
        "An exception in a worker raises WorkerLost, so the run retries what will fail again.",
        layout=TWO,
    )(_errors(WorkerError, lambda error: WorkerLost(str(error)))),
)


@mutant("shares_reversed", "Workers get their shares in reverse order.", layout=TWO)
@around(_SHARDED)
def _shares_reversed(run: Any, _: Any, *method: Any, in_sharded_axes: Any = (), **keywords: Any) -> Any:
    reversed_ = {name: keywords[name][::-1] for name in keywords.keys() & {"share", "value"} if in_sharded_axes}
    return run(*method, in_sharded_axes=in_sharded_axes, **keywords | reversed_)


@mutant("free_axis_called", "All workers along a free axis are called.", layout=TWO)
@around(_SHARDED)
def _free_axis_called(run: Any, _: Any, *method: Any, **keywords: Any) -> Any:
    return run(
        *method, **keywords if keywords.get("in_sharded_axes") else keywords | {"replicate_on_axes": ["data_parallel"]}
    )


@mutant("one_worker_becomes_the_first", "A call of a single worker always reaches worker 0.", layout=TWO)
@around(_ONE)
def _one_worker_becomes_the_first(run: Any, _: Any, method_name: str, worker_idx: int, **keywords: Any) -> Any:
    return run(method_name, 0, **keywords)


@mutant("one_worker_becomes_all", "A call of a single worker reaches all workers.", layout=TWO)
@around(_ONE)
def _one_worker_becomes_all(_: Any, group: Any, method_name: str, worker_idx: int, **keywords: Any) -> Any:
    future = group.run_all_workers_single_data(method_name, **keywords)
    future.return_from_workers = [worker_idx]
    return future


@mutant("indices_wrap_around", "A worker index out of range wraps around.", layout=TWO)
@around(_ONE)
def _indices_wrap_around(run: Any, group: Any, method_name: str, worker_idx: int, *args: Any, **keywords: Any) -> Any:
    return run(method_name, worker_idx % group.sharding.size, *args, **keywords)


@mutant(
    "skipped_workers_take_entries", "Every worker gets an entry, including those that should be skipped.", layout=TWO
)
@around(_MULTIPLE)
def _skipped_workers_take_entries(run: Any, _: Any, *method: Any, **keywords: Any) -> Any:
    skips = keywords.get("run_rank_0_only_axes") is not None
    return run(*method, **{"value": keywords["value"] * 2} if skips else keywords)


@mutant("notices_lost", "A notice does not reach the workers.", layout=TWO)
@around(WorkerGroup.__init__)
def _notices_lost(start: Any, group: Any, *args: Any, **keywords: Any) -> None:
    start(*args, **keywords)
    group.notifies, group.notify = True, lambda: None


@mutant("failures_as_results", "The callback of a call that has failed gets no results instead of None.")
@around(WorkerGroup.when_done)
def _failures_as_results(when_done: Any, _: Any, future: Any, callback: Any) -> Any:
    return when_done(future, lambda results: callback(results or []))


@mutant("memory_shared", "Workers write into the driver's tensors.", layout=TWO)
@around(_SINGLE)
def _memory_shared(run: Any, _: Any, *method: Any, **keywords: Any) -> Any:
    future = run(*method, **keywords)
    for value in keywords.values():
        if isinstance(value, torch.Tensor):
            value.zero_()
    return future


@mutant("positional_taken", "Positional arguments are accepted.")
@around(_SINGLE)
def _positional_taken(run: Any, _: Any, method_name: str, *args: Any, **keywords: Any) -> Any:
    return run(method_name, **dict.fromkeys(["value"][: len(args)], 0), **keywords)


@mutant("one_slot_for_answers", "A second call overwrites the results of the first.")
@around(_SINGLE, _RESULTS)
def _one_slot_for_answers(call: Any, group: Any, called: Any, **keywords: Any) -> Any:
    if isinstance(called, str):
        group.last, group.results = call(called, **keywords), None
        return group.last
    if group.results is None:
        group.results = call(group.last)
    return list(group.results)


@mutant("failure_swallowed", "A failed call returns None for every result.", layout=TWO)
@around(_RESULTS)
def _failure_swallowed(wait: Any, group: Any, future: Any) -> Any:
    try:
        return wait(future)
    except Exception:  # noqa: BLE001 - the bug
        return [None] * group.sharding.size


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
