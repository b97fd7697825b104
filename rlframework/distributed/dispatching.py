"""What all worker groups share: who is called with what. A group only says how a call is made, in `_run`."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlframework.distributed import dispatch
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerGroup

if TYPE_CHECKING:
    from rlframework.distributed.named_sharding import NamedSharding


class DispatchingWorkerGroup(WorkerGroup):
    """A worker group whose calls are dispatched by its sharding."""

    def __init__(self, sharding: NamedSharding) -> None:
        self._sharding = sharding

    @property
    def sharding(self) -> NamedSharding:
        """See `WorkerGroup.sharding`."""
        return self._sharding

    @abstractmethod
    def _run(self, method_name: str, plan: dispatch.Dispatch) -> MultiWorkerFuture:
        """Begin the calls of `plan`."""

    def run_single_worker_single_data(
        self, method_name: str, worker_idx: int, *args: Any, **kwargs: Any
    ) -> MultiWorkerFuture:
        """See `WorkerGroup.run_single_worker_single_data`."""
        dispatch.refuse_positional(method_name, args)
        return self._run(method_name, dispatch.dispatch_to_one(self._sharding, worker_idx, kwargs))

    def run_all_workers_multiple_data(
        self,
        method_name: str,
        *args: Any,
        run_rank_0_only_axes: Sequence[str] | None = None,
        common_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> MultiWorkerFuture:
        """See `WorkerGroup.run_all_workers_multiple_data`."""
        dispatch.refuse_positional(method_name, args)
        plan = dispatch.dispatch_multiple_data(
            self._sharding, kwargs, run_rank_0_only_axes=run_rank_0_only_axes, common_kwargs=common_kwargs
        )
        return self._run(method_name, plan)

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: Sequence[str] | None = None, **kwargs: Any
    ) -> MultiWorkerFuture:
        """See `WorkerGroup.run_all_workers_single_data`."""
        dispatch.refuse_positional(method_name, args)
        return self._run(method_name, dispatch.dispatch_single_data(self._sharding, kwargs, run_rank_0_only_axes))

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
        dispatch.refuse_positional(method_name, args)
        plan = dispatch.dispatch_sharded_data(
            self._sharding,
            kwargs,
            in_sharded_axes=in_sharded_axes,
            replicate_on_axes=replicate_on_axes,
            output_is_replicated=output_is_replicated,
            make_dummy_calls_to_free_axes=make_dummy_calls_to_free_axes,
            common_kwargs=common_kwargs,
        )
        return self._run(method_name, plan)
