"""Broken worker groups: wrong arguments of calls, and calls of the wrong workers."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.worker_group import WorkerGroup
from rlframework_conformance.mutants.mutant import around, mutant
from rlframework_conformance.mutants.worker_group import TWO

_ONE = WorkerGroup.run_single_worker_single_data
_SINGLE = WorkerGroup.run_all_workers_single_data
_MULTIPLE = WorkerGroup.run_all_workers_multiple_data
_SHARDED = WorkerGroup.run_all_workers_sharded_data


def _each_value_of(method: Callable[..., Any]) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
    """Decorate a change of each value that `method` gets by keyword."""
    return lambda change: around(method)(
        lambda run, _, *args, **keywords: run(*args, **{name: change(value) for name, value in keywords.items()})
    )


@mutant("shares_reversed", "Workers get their shares in reverse order.", layout=TWO)
@around(_SHARDED)
def _shares_reversed(run: Any, _: Any, *method: Any, in_sharded_axes: Any = (), **keywords: Any) -> Any:
    reversed_ = {name: keywords[name][::-1] for name in keywords.keys() & {"share", "value"} if in_sharded_axes}
    return run(*method, in_sharded_axes=in_sharded_axes, **keywords | reversed_)


@mutant("common_lost", "The arguments common to all workers are dropped.", layout=TWO)
@around(_SHARDED)
def _common_lost(run: Any, _: Any, *method: Any, common_kwargs: Any = None, **keywords: Any) -> Any:
    return run(*method, **keywords)


@mutant("replicas_not_called", "Only coordinate 0 of a replicated axis is called.", layout=TWO)
@around(_SHARDED)
def _replicas_not_called(run: Any, _: Any, *method: Any, replicate_on_axes: Any = (), **keywords: Any) -> Any:
    return run(*method, **keywords)


@mutant("replicated_outputs_all_kept", "A replicated output comes back once per replica.", layout=TWO)
@around(_SHARDED)
def _replicated_outputs_all_kept(
    run: Any, _: Any, *method: Any, output_is_replicated: Any = (), **keywords: Any
) -> Any:
    return run(*method, **keywords)


@mutant("free_axis_called", "All workers along a free axis are called.", layout=TWO)
@around(_SHARDED)
def _free_axis_called(run: Any, _: Any, *method: Any, **keywords: Any) -> Any:
    return run(
        *method, **keywords if keywords.get("in_sharded_axes") else keywords | {"replicate_on_axes": ["data_parallel"]}
    )


@mutant("no_dummy_calls", "Workers along a free axis get no dummy call.", layout=TWO)
@around(_SHARDED)
def _no_dummy_calls(run: Any, _: Any, *method: Any, make_dummy_calls_to_free_axes: Any = False, **keywords: Any) -> Any:
    return run(*method, **keywords)


@mutant("rank_0_only_ignored", "All ranks run what only rank 0 should run.", layout=TWO)
@around(_SINGLE)
def _rank_0_only_ignored(run: Any, _: Any, *method: Any, run_rank_0_only_axes: Any = None, **keywords: Any) -> Any:
    return run(*method, **keywords)


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


@mutant("entries_reversed", "Workers get their entries in reverse order.", layout=TWO)
@_each_value_of(_MULTIPLE)
def _entries_reversed(value: Any) -> Any:
    return value[::-1] if isinstance(value, list) else value


@mutant(
    "skipped_workers_take_entries", "Every worker gets an entry, including those that should be skipped.", layout=TWO
)
@around(_MULTIPLE)
def _skipped_workers_take_entries(run: Any, _: Any, *method: Any, **keywords: Any) -> Any:
    skips = keywords.get("run_rank_0_only_axes") is not None
    return run(*method, **{"value": keywords["value"] * 2} if skips else keywords)


@mutant("entries_not_counted", "Surplus entries are silently dropped.", layout=TWO)
@_each_value_of(_MULTIPLE)
def _entries_not_counted(value: Any) -> Any:
    return value[:2] if isinstance(value, list) else value


@mutant("notices_lost", "A notice does not reach the workers.", layout=TWO)
@around(WorkerGroup.__init__)
def _notices_lost(start: Any, group: Any, *args: Any, **keywords: Any) -> None:
    start(*args, **keywords)
    group.notifies, group.notify = True, lambda: None


@mutant("callbacks_lost", "A callback is promised and never called.")
@around(WorkerGroup.when_done)
def _callbacks_lost(*_: Any) -> bool:
    return True


@mutant("failures_as_results", "The callback of a call that has failed gets no results instead of None.")
@around(WorkerGroup.when_done)
def _failures_as_results(when_done: Any, _: Any, future: Any, callback: Any) -> Any:
    return when_done(future, lambda results: callback(results or []))


@mutant("batch_becomes_a_dict", "A batch arrives as a plain dictionary.")
@_each_value_of(_SINGLE)
def _batch_becomes_a_dict(value: Any) -> Any:
    return dict(value) if isinstance(value, BatchedDataDict) else value


@mutant("messages_cut", "A tensor larger than a buffer arrives truncated.", layout=TWO)
@_each_value_of(_SHARDED)
def _messages_cut(value: Any) -> Any:
    return (
        [one[: 2**20] if isinstance(one, torch.Tensor) else one for one in value] if isinstance(value, list) else value
    )


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


@mutant("shares_not_counted", "Surplus shares are silently dropped.", layout=TWO)
@_each_value_of(_SHARDED)
def _shares_not_counted(value: Any) -> Any:
    return value[:2] if isinstance(value, list) and len(value) > 2 and isinstance(value[0], str) else value


@mutant("unsendable_dropped", "Arguments that cannot be pickled arrive as None.", layout=TWO)
@_each_value_of(_SINGLE)
def _unsendable_dropped(value: Any) -> Any:
    try:
        pickle.dumps(value)
    except Exception:  # noqa: BLE001 - the bug: any error goes unnoticed
        return None
    return value


@mutant("classes_by_reference", "Objects of a class that only the driver's program has cannot be sent.", layout=TWO)
@_each_value_of(_SINGLE)
def _classes_by_reference(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))  # noqa: S301 - pickled in the same line
