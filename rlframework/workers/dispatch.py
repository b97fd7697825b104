"""Dispatch of calls over a `NamedSharding`: which worker gets which arguments, and whose results are returned.

`InlineWorkerGroup` is the simplest group: one worker in the driver's own process, without Ray or threads, so that a
debugger works.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any

from rlframework.base.errors import BatchError, ConfigError, UserError, WorkerError
from rlframework.config.sections import WorkerGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerContext, WorkerGroup, WorkerSpec
from rlframework.plugins.discovery import load_target

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dispatch:
    """A planned call: worker `called[i]` gets `kwargs[i]`; the workers in `returned` return their results, in order."""

    called: list[int]
    kwargs: list[dict[str, Any]]
    returned: list[int]


class PositionalArgumentsError(UserError, TypeError, AssertionError):
    """A worker was called with positional arguments. Also an `AssertionError`, for code written for NeMo-RL."""


def reject_own_python(spec: WorkerSpec, group: str) -> None:
    """Raise a `ConfigError` if the worker names its own Python, which the worker group `group` does not support."""
    if spec.py_executable is not None:
        raise ConfigError(
            f"the worker {spec.target} needs its own Python ({spec.py_executable}), which worker_group.name={group} "
            "does not support: use worker_group.name=ray"
        )


def select_results(future: MultiWorkerFuture, results: Sequence[Any]) -> list[Any]:
    """The results to return, in the order of `future.return_from_workers`; `results[i]` is that of `futures[i]`."""
    if future.return_from_workers is None:
        return list(results)
    called = range(len(results)) if future.called_workers is None else future.called_workers
    by_worker = dict(zip(called, results, strict=True))
    return [by_worker[worker] for worker in future.return_from_workers if worker in by_worker]


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

    def _check_call(self, method_name: str, args: Sequence[Any], axes: Sequence[str] | None, *, shards: bool) -> None:
        """Reject an invalid call; `shards` says whether it is sharded, `axes` on which axes it skips workers."""
        if args:
            raise PositionalArgumentsError(
                f"{method_name}: got {len(args)} positional argument(s); workers take keywords: pass each as name=value"
            )

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> MultiWorkerFuture:
        """See `WorkerGroup.run_single_worker_single_data`."""
        self._check_call(method_name, args, None, shards=False)
        size = self.sharding.size
        if not 0 <= worker_idx < size:
            raise IndexError(f"no worker {worker_idx} in a group of {size}: use 0..{size - 1}")
        return self._run(method_name, Dispatch([worker_idx], [kwargs], [worker_idx]))

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Any,
        run_rank_0_only_axes: Sequence[str] | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """See `WorkerGroup.run_all_workers_multiple_data`."""
        self._check_call(method_name, args, run_rank_0_only_axes, shards=False)
        called = self._at_zero(run_rank_0_only_axes)
        if not kwargs:
            raise BatchError(
                "run_all_workers_multiple_data needs at least one argument with an entry for each worker; use "
                "run_all_workers_single_data if all workers get the same arguments"
            )
        for name, value in kwargs.items():
            if not isinstance(value, (list, tuple)) or len(value) != len(called):
                got = f"{len(value)} entries" if isinstance(value, (list, tuple)) else f"a {type(value).__name__}"
                raise BatchError(
                    f"argument {name!r} must be a list of {len(called)} entries, one for each called worker; got {got}."
                    " Pass values that are the same for all workers in common_kwargs"
                )
        entries = [
            {name: value[entry] for name, value in kwargs.items()} | dict(common_kwargs or {})
            for entry in range(len(called))
        ]
        return self._run(method_name, Dispatch(called, entries, called))

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: Sequence[str] | None = None, **kwargs: Any
    ) -> MultiWorkerFuture:
        """See `WorkerGroup.run_all_workers_single_data`."""
        self._check_call(method_name, args, run_rank_0_only_axes, shards=False)
        called = self._at_zero(run_rank_0_only_axes)
        return self._run(method_name, Dispatch(called, [kwargs] * len(called), called))

    def run_all_workers_sharded_data(
        self,
        method_name: str,
        *args: Any,
        in_sharded_axes: Sequence[str] | None = None,
        replicate_on_axes: Sequence[str] | None = None,
        output_is_replicated: Sequence[str] | None = None,
        make_dummy_calls_to_free_axes: bool = False,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """See `WorkerGroup.run_all_workers_sharded_data`."""
        self._check_call(method_name, args, None, shards=True)
        sharding, sharded, replicated = self.sharding, self._known(in_sharded_axes), self._known(replicate_on_axes)
        if both := [axis for axis in sharded if axis in replicated]:
            raise ValueError(f"Axes cannot be both sharded and replicated: {both}")
        for name, value in kwargs.items():
            _check_shards(name, value, sharding, sharded)
        with_data = self._at_zero([axis for axis in sharding.names if axis not in (*sharded, *replicated)])
        returned_once = self._at_zero(output_is_replicated)
        called = list(range(sharding.size)) if make_dummy_calls_to_free_axes else with_data
        shards, given, once = [], set(with_data), set(returned_once)
        for worker in called:
            coords = sharding.get_worker_coords(worker)
            index = [coords[axis] for axis in sharded]
            own = {name: reduce(getitem, index, value) if worker in given else None for name, value in kwargs.items()}
            shards.append(own | dict(common_kwargs or {}))
        return self._run(method_name, Dispatch(called, shards, [each for each in with_data if each in once]))

    def _known(self, axes: Sequence[str] | None) -> list[str]:
        """These axes; raises `ValueError` if one does not exist."""
        if isinstance(axes, str):
            raise TypeError(f"axes must be a list of names, got the string {axes!r}")
        for axis in axes or ():
            self.sharding.get_axis_index(axis)
        return list(axes or ())

    def _at_zero(self, axes: Sequence[str] | None) -> list[int]:
        """The workers at coordinate 0 on all of these axes."""
        sharding, known = self.sharding, self._known(axes)
        ranks = range(sharding.size)
        return [rank for rank in ranks if sharding.is_axis_zero(sharding.get_worker_coords(rank), known)]


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


class InlineWorkerGroup(DispatchingWorkerGroup):
    """A worker group of size one.

    Calls run immediately, so futures hold results and deadlines do not apply. The worker's exceptions are raised
    unchanged, and leave the group usable.
    """

    def __init__(self, spec: WorkerSpec, config: WorkerGroupConfig, *, sharding: NamedSharding, device: str) -> None:
        if config.num_workers != 1 or sharding.size != 1:
            raise ConfigError(
                f"worker_group.name=inline runs one worker, not {max(config.num_workers, sharding.size)}: "
                "set worker_group.num_workers=1, or use worker_group.name=processes or ray"
            )
        reject_own_python(spec, "inline")
        super().__init__(sharding)
        context = WorkerContext(device=device, deadline=config.deadlines.call)
        self._worker: Any = load_target(spec.target)(**spec.kwargs, context=context)

    def get_all_worker_results(self, future: MultiWorkerFuture) -> list[Any]:
        """Return the results, which are available already."""
        return select_results(future, future.futures)

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        """Call `cleanup_method` and release the worker. If the call raises, log the exception and return False."""
        worker, self._worker = self._worker, None
        if worker is None or cleanup_method is None:
            return True
        try:
            getattr(worker, cleanup_method)()
        except Exception:  # noqa: BLE001 - logged with its traceback; the shutdown must continue
            _LOG.exception("the worker failed in %s during shutdown", cleanup_method)
            return False
        return True

    def _run(self, method_name: str, plan: Dispatch) -> MultiWorkerFuture:
        if self._worker is None:
            raise WorkerError(f"{method_name} was called on a worker group that has been shut down")
        (kwargs,) = plan.kwargs
        result = getattr(self._worker, method_name)(**kwargs)
        return MultiWorkerFuture([result], return_from_workers=plan.returned, called_workers=plan.called)
