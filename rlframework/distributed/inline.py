"""`InlineWorkerGroup`: one worker in the driver's own process. No Ray, no threads: a debugger works."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rlframework.distributed import dispatch
from rlframework.distributed.worker_host import load_target
from rlframework.errors import ConfigError, WorkerError
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerContext, WorkerGroup, WorkerSpec

if TYPE_CHECKING:
    from rlframework.config.sections import WorkerGroupConfig
    from rlframework.distributed.named_sharding import NamedSharding

_LOG = logging.getLogger(__name__)


class InlineWorkerGroup(WorkerGroup):
    """A group of one. Calls run at once, so futures hold results, deadlines do not apply, and exceptions of the worker
    reach the caller as they are; the group stays usable after one.
    """

    def __init__(self, spec: WorkerSpec, config: WorkerGroupConfig, *, sharding: NamedSharding, device: str) -> None:
        if config.num_workers != 1 or sharding.size != 1:
            raise ConfigError(
                f"worker_group.name=inline runs one worker, got {max(config.num_workers, sharding.size)}: set "
                "worker_group.num_workers=1, or take worker_group.name=ray"
            )
        if spec.py_executable is not None:
            raise ConfigError(
                f"the worker {spec.target} needs a Python of its own ({spec.py_executable}), which "
                "worker_group.name=inline cannot give: take worker_group.name=ray"
            )
        self._sharding = sharding
        context = WorkerContext(device=device, deadline=config.deadlines.call)
        self._worker: Any = load_target(spec.target)(**spec.kwargs, context=context)

    @property
    def sharding(self) -> NamedSharding:
        """One worker on every axis."""
        return self._sharding

    def run_all_workers_single_data(
        self, method_name: str, *args: Any, run_rank_0_only_axes: Sequence[str] | None = None, **kwargs: Any
    ) -> MultiWorkerFuture:
        """Call the worker now."""
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
        """Call the worker now with the only share: entry 0 of each list."""
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

    def get_all_worker_results(self, future: MultiWorkerFuture) -> list[Any]:
        """The results, which are there already."""
        return dispatch.keep_results(future, future.futures)

    def shutdown(self, cleanup_method: str | None = None, timeout: float | None = None) -> bool:
        """Call `cleanup_method` and let the worker go. An exception in it is logged, and makes the result False."""
        worker, self._worker = self._worker, None
        if worker is None or cleanup_method is None:
            return True
        try:
            getattr(worker, cleanup_method)()
        except Exception:  # noqa: BLE001 - logged with its traceback; shutting down must go on
            _LOG.exception("the worker failed in %s while it was shut down", cleanup_method)
            return False
        return True

    def _run(self, method_name: str, plan: dispatch.Dispatch) -> MultiWorkerFuture:
        if self._worker is None:
            raise WorkerError(f"{method_name} was called on a worker group that was shut down")
        method = getattr(self._worker, method_name)
        results = [method(**kwargs) for kwargs in plan.kwargs]
        return MultiWorkerFuture(results, return_from_workers=plan.kept, called_workers=plan.called)
