"""Which worker gets which arguments of a call, and whose results are kept, over a `NamedSharding`; starts no processes.

`DispatchingWorkerGroup` is the base of the worker groups that are called this way: a group supplies `_run`.
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
    """`kwargs[i]` go to worker `called[i]`; the results of the workers in `kept` are returned, in that order."""

    called: list[int]
    kwargs: list[dict[str, Any]]
    kept: list[int]


class PositionalArgumentsError(UserError, TypeError, AssertionError):
    """A worker was called with positional arguments. An `AssertionError` too, for code written for NeMo-RL."""


def is_small(value: Any) -> bool:
    """Whether `value` is a plain scalar: sending it once per worker costs no more than storing it once for all."""
    return value is None or isinstance(value, (bool, int, float, str))


def refuse_positional(method_name: str, args: Sequence[Any]) -> None:
    """A `TypeError` that says to use keywords, when there are `args`."""
    if args:
        raise PositionalArgumentsError(
            f"{method_name}: {len(args)} positional argument(s) given; workers take keywords: pass each as name=value"
        )


def dispatch_single_data(
    sharding: NamedSharding, kwargs: Mapping[str, Any], run_rank_0_only_axes: Sequence[str] | None = None
) -> Dispatch:
    """The same arguments to all workers that stand at 0 on `run_rank_0_only_axes`."""
    axes = _known_axes(sharding, run_rank_0_only_axes)
    called = [
        worker
        for worker in range(sharding.size)
        if NamedSharding.is_axis_zero(sharding.get_worker_coords(worker), axes)
    ]
    return Dispatch(called, [dict(kwargs) for _ in called], called)


def dispatch_to_one(sharding: NamedSharding, worker_idx: int, kwargs: Mapping[str, Any]) -> Dispatch:
    """`kwargs` to worker `worker_idx` alone; an `IndexError` where there is none."""
    if not 0 <= worker_idx < sharding.size:
        raise IndexError(f"worker {worker_idx} of {sharding.size}: `worker_idx` must be in 0..{sharding.size - 1}")
    return Dispatch([worker_idx], [dict(kwargs)], [worker_idx])


def dispatch_multiple_data(
    sharding: NamedSharding,
    kwargs: Mapping[str, Any],
    *,
    run_rank_0_only_axes: Sequence[str] | None = None,
    common_kwargs: Mapping[str, Any] | None = None,
) -> Dispatch:
    """Entry i of each value to the i-th worker that is called: see `WorkerGroup.run_all_workers_multiple_data`.

    No value at all, or one that is no list of as many entries as workers are called, is a `BatchError`.
    """
    called = dispatch_single_data(sharding, {}, run_rank_0_only_axes).called
    if not kwargs:
        raise BatchError(
            "run_all_workers_multiple_data needs an argument with one entry for each worker; what is the same for all "
            "goes by run_all_workers_single_data"
        )
    for name, value in kwargs.items():
        if not isinstance(value, (list, tuple)) or len(value) != len(called):
            got = f"{len(value)} entries" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
            raise BatchError(
                f"argument {name!r} must be a list of {len(called)} entries, one for each worker that is called; got "
                f"{got}; pass what is the same for all in common_kwargs"
            )
    common = common_kwargs or {}
    shares = [{**{name: value[entry] for name, value in kwargs.items()}, **common} for entry in range(len(called))]
    return Dispatch(called, shares, called)


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
    """Each worker's share of `kwargs`: see `WorkerGroup.run_all_workers_sharded_data`.

    An axis that does not exist, or is both sharded and replicated, is a `ValueError`; a value whose lists do not have
    as many entries as its axis has workers is a `BatchError`.
    """
    sharded = _known_axes(sharding, in_sharded_axes)
    replicated = _known_axes(sharding, replicate_on_axes)
    returned_once = _known_axes(sharding, output_is_replicated)
    both = [axis for axis in sharded if axis in replicated]
    if both:
        raise ValueError(f"Axes cannot be both sharded and replicated: {both}")
    for name, value in kwargs.items():
        _check_share(name, value, sharding, sharded)
    free = [axis for axis in sharding.names if axis not in sharded and axis not in replicated]
    called: list[int] = []
    shares: list[dict[str, Any]] = []
    kept: list[int] = []
    for worker in range(sharding.size):
        coords = sharding.get_worker_coords(worker)
        has_data = NamedSharding.is_axis_zero(coords, free)
        if has_data or make_dummy_calls_to_free_axes:
            share = {name: _share(value, coords, sharded) if has_data else None for name, value in kwargs.items()}
            called.append(worker)
            shares.append({**share, **(common_kwargs or {})})
        if has_data and NamedSharding.is_axis_zero(coords, returned_once):
            kept.append(worker)
    return Dispatch(called, shares, kept)


def keep_results(future: MultiWorkerFuture, results: Sequence[Any]) -> list[Any]:
    """Those of `results` (one for each of `future.futures`) that the caller wants, in the order that it wants."""
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


def _check_share(name: str, value: Any, sharding: NamedSharding, axes: Sequence[str]) -> None:
    if not axes:
        return
    size = sharding.get_axis_size(axes[0])
    if not isinstance(value, (list, tuple)):
        raise BatchError(
            f"argument {name!r} is split over axis '{axes[0]}': it must be a list of {size} entries, got a "
            f"{type(value).__name__}; pass what is the same for all in common_kwargs"
        )
    if len(value) != size:
        raise BatchError(f"argument {name!r} has {len(value)} entries; axis '{axes[0]}' needs {size}")
    for entry in value:
        _check_share(name, entry, sharding, axes[1:])


def _share(value: Any, coords: Mapping[str, int], axes: Sequence[str]) -> Any:
    for axis in axes:
        value = value[coords[axis]]
    return value


class DispatchingWorkerGroup(WorkerGroup):
    """A worker group whose calls are dispatched by its sharding."""

    def __init__(self, sharding: NamedSharding) -> None:
        self._sharding = sharding

    @property
    def sharding(self) -> NamedSharding:
        """See `WorkerGroup.sharding`."""
        return self._sharding

    @abstractmethod
    def _run(self, method_name: str, plan: Dispatch) -> MultiWorkerFuture:
        """Begin the calls of `plan`."""

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> MultiWorkerFuture:
        """See `WorkerGroup.run_single_worker_single_data`."""
        refuse_positional(method_name, args)
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
        refuse_positional(method_name, args)
        plan = dispatch_multiple_data(
            self._sharding, kwargs, run_rank_0_only_axes=run_rank_0_only_axes, common_kwargs=common_kwargs
        )
        return self._run(method_name, plan)

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: Sequence[str] | None = None, **kwargs: Any
    ) -> MultiWorkerFuture:
        """See `WorkerGroup.run_all_workers_single_data`."""
        refuse_positional(method_name, args)
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
        refuse_positional(method_name, args)
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
