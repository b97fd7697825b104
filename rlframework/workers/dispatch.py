"""Dispatch of calls over a `NamedSharding`: which worker gets which arguments, and whose results are returned.

Starts no processes. `DispatchingWorkerGroup` is the base class of the worker groups that dispatch their calls this way;
a group implements `_run`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlframework.errors import BatchError, UserError
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerGroup


@dataclass(frozen=True)
class Dispatch:
    """A planned call: worker `called[i]` gets `kwargs[i]`; the workers in `returned` return their results, in order."""

    called: list[int]
    kwargs: list[dict[str, Any]]
    returned: list[int]


class PositionalArgumentsError(UserError, TypeError, AssertionError):
    """A worker was called with positional arguments. Also an `AssertionError`, for code written for NeMo-RL."""


def is_small(value: Any) -> bool:
    """Whether `value` is a plain scalar, which is as cheap to send to each worker as to store once for all of them."""
    return value is None or isinstance(value, (bool, int, float, str))


def reject_positional(method_name: str, args: Sequence[Any]) -> None:
    """Raise a `TypeError` if there are any positional `args`."""
    if args:
        raise PositionalArgumentsError(
            f"{method_name}: got {len(args)} positional argument(s); workers take keywords: pass each as name=value"
        )


def dispatch_single_data(
    sharding: NamedSharding, kwargs: Mapping[str, Any], run_rank_0_only_axes: Sequence[str] | None = None
) -> Dispatch:
    """Send the same arguments to all workers at coordinate 0 on `run_rank_0_only_axes`."""
    axes = _known_axes(sharding, run_rank_0_only_axes)
    called = [
        worker
        for worker in range(sharding.size)
        if NamedSharding.is_axis_zero(sharding.get_worker_coords(worker), axes)
    ]
    return Dispatch(called, [dict(kwargs) for _ in called], called)


def dispatch_to_one(sharding: NamedSharding, worker_idx: int, kwargs: Mapping[str, Any]) -> Dispatch:
    """Send `kwargs` to worker `worker_idx` only; raise `IndexError` if there is no such worker."""
    if not 0 <= worker_idx < sharding.size:
        raise IndexError(f"no worker {worker_idx} in a group of {sharding.size}: use 0..{sharding.size - 1}")
    return Dispatch([worker_idx], [dict(kwargs)], [worker_idx])


def dispatch_multiple_data(
    sharding: NamedSharding,
    kwargs: Mapping[str, Any],
    *,
    run_rank_0_only_axes: Sequence[str] | None = None,
    common_kwargs: Mapping[str, Any] | None = None,
) -> Dispatch:
    """Send entry i of each value to the i-th called worker: see `WorkerGroup.run_all_workers_multiple_data`.

    Raises `BatchError` if there are no values, or if one is not a list with an entry for each called worker.
    """
    called = dispatch_single_data(sharding, {}, run_rank_0_only_axes).called
    if not kwargs:
        raise BatchError(
            "run_all_workers_multiple_data needs at least one argument with an entry for each worker; use "
            "run_all_workers_single_data if all workers get the same arguments"
        )
    for name, value in kwargs.items():
        if not isinstance(value, (list, tuple)) or len(value) != len(called):
            got = f"{len(value)} entries" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
            raise BatchError(
                f"argument {name!r} must be a list of {len(called)} entries, one for each called worker; got {got}. "
                "Pass values that are the same for all workers in common_kwargs"
            )
    common = common_kwargs or {}
    entries = [{**{name: value[entry] for name, value in kwargs.items()}, **common} for entry in range(len(called))]
    return Dispatch(called, entries, called)


def dispatch_sharded_data(
    sharding: NamedSharding,
    kwargs: Mapping[str, Any],
    *,
    in_sharded_axes: Sequence[str] = (),
    replicate_on_axes: Sequence[str] = (),
    output_is_replicated: Sequence[str] = (),
    make_dummy_calls_to_free_axes: bool = False,
    common_kwargs: Mapping[str, Any] | None = None,
) -> Dispatch:
    """Send each worker its shard of `kwargs`: see `WorkerGroup.run_all_workers_sharded_data`.

    Raises `ValueError` if an axis does not exist or is both sharded and replicated, and `BatchError` if the length of a
    value's list differs from the size of its axis.
    """
    sharded = _known_axes(sharding, in_sharded_axes)
    replicated = _known_axes(sharding, replicate_on_axes)
    returned_once = _known_axes(sharding, output_is_replicated)
    both = [axis for axis in sharded if axis in replicated]
    if both:
        raise ValueError(f"Axes cannot be both sharded and replicated: {both}")
    for name, value in kwargs.items():
        _check_shards(name, value, sharding, sharded)
    free = [axis for axis in sharding.names if axis not in sharded and axis not in replicated]
    called: list[int] = []
    shards: list[dict[str, Any]] = []
    returned: list[int] = []
    for worker in range(sharding.size):
        coords = sharding.get_worker_coords(worker)
        has_data = NamedSharding.is_axis_zero(coords, free)
        if has_data or make_dummy_calls_to_free_axes:
            shard = {name: _shard(value, coords, sharded) if has_data else None for name, value in kwargs.items()}
            called.append(worker)
            shards.append({**shard, **(common_kwargs or {})})
        if has_data and NamedSharding.is_axis_zero(coords, returned_once):
            returned.append(worker)
    return Dispatch(called, shards, returned)


def select_results(future: MultiWorkerFuture, results: Sequence[Any]) -> list[Any]:
    """The results to return, in the order of `future.return_from_workers`; `results[i]` is that of `futures[i]`."""
    if future.return_from_workers is None:
        return list(results)
    called = range(len(results)) if future.called_workers is None else future.called_workers
    by_worker = dict(zip(called, results, strict=True))
    return [by_worker[worker] for worker in future.return_from_workers if worker in by_worker]


def _known_axes(sharding: NamedSharding, axes: Sequence[str] | None) -> list[str]:
    if isinstance(axes, str):
        raise TypeError(f"axes must be a list of names, got the string {axes!r}")
    for axis in axes or ():
        sharding.get_axis_index(axis)
    return list(axes or ())


def _check_shards(name: str, value: Any, sharding: NamedSharding, axes: Sequence[str]) -> None:
    if not axes:
        return
    size = sharding.get_axis_size(axes[0])
    if not isinstance(value, (list, tuple)):
        raise BatchError(
            f"argument {name!r} is sharded over axis '{axes[0]}': it must be a list of {size} entries, got a "
            f"{type(value).__name__}. Pass values that are the same for all workers in common_kwargs"
        )
    if len(value) != size:
        raise BatchError(f"argument {name!r} has {len(value)} entries; axis '{axes[0]}' needs {size}")
    for entry in value:
        _check_shards(name, entry, sharding, axes[1:])


def _shard(value: Any, coords: Mapping[str, int], axes: Sequence[str]) -> Any:
    for axis in axes:
        value = value[coords[axis]]
    return value


class DispatchingWorkerGroup(WorkerGroup):
    """A worker group that dispatches its calls over its sharding."""

    def __init__(self, sharding: NamedSharding) -> None:
        self._sharding = sharding

    @property
    def sharding(self) -> NamedSharding:
        """See `WorkerGroup.sharding`."""
        return self._sharding

    @abstractmethod
    def _run(self, method_name: str, plan: Dispatch) -> MultiWorkerFuture:
        """Start the calls of `plan`."""

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> MultiWorkerFuture:
        """See `WorkerGroup.run_single_worker_single_data`."""
        reject_positional(method_name, args)
        return self._run(method_name, dispatch_to_one(self._sharding, worker_idx, kwargs))

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Any,
        run_rank_0_only_axes: Sequence[str] | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """See `WorkerGroup.run_all_workers_multiple_data`."""
        reject_positional(method_name, args)
        plan = dispatch_multiple_data(
            self._sharding, kwargs, run_rank_0_only_axes=run_rank_0_only_axes, common_kwargs=common_kwargs
        )
        return self._run(method_name, plan)

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: Sequence[str] | None = None, **kwargs: Any
    ) -> MultiWorkerFuture:
        """See `WorkerGroup.run_all_workers_single_data`."""
        reject_positional(method_name, args)
        return self._run(method_name, dispatch_single_data(self._sharding, kwargs, run_rank_0_only_axes))

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *args: Any,
        in_sharded_axes: Sequence[str] = (),
        replicate_on_axes: Sequence[str] = (),
        output_is_replicated: Sequence[str] = (),
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """See `WorkerGroup.run_all_workers_sharded_data`."""
        reject_positional(method_name, args)
        plan = dispatch_sharded_data(
            self._sharding,
            kwargs,
            in_sharded_axes=in_sharded_axes,
            replicate_on_axes=replicate_on_axes,
            output_is_replicated=output_is_replicated,
            make_dummy_calls_to_free_axes=make_dummy_calls_to_free_axes,
            common_kwargs=common_kwargs,
        )
        return self._run(method_name, plan)
