"""`InlineWorkerGroup`: one worker in the driver's own process. No Ray, no threads: a debugger works."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from rlframework.errors import ConfigError, WorkerError
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerContext, WorkerSpec
from rlframework.plugins.loading import load_target
from rlframework.workers import dispatch
from rlframework.workers.dispatch import DispatchingWorkerGroup

if TYPE_CHECKING:
    from rlframework.config.sections import WorkerGroupConfig
    from rlframework.interfaces.named_sharding import NamedSharding

_LOG = logging.getLogger(__name__)


class InlineWorkerGroup(DispatchingWorkerGroup):
    """A group of one. Calls run at once, so futures hold results, deadlines do not apply, and exceptions of the worker
    reach the caller as they are; the group stays usable after one.
    """

    def __init__(self, spec: WorkerSpec, config: WorkerGroupConfig, *, sharding: NamedSharding, device: str) -> None:
        if config.num_workers != 1 or sharding.size != 1:
            raise ConfigError(
                f"worker_group.name=inline runs one worker, got {max(config.num_workers, sharding.size)}: set "
                "worker_group.num_workers=1, or take worker_group.name=processes or ray"
            )
        if spec.py_executable is not None:
            raise ConfigError(
                f"the worker {spec.target} needs a Python of its own ({spec.py_executable}), which "
                "worker_group.name=inline cannot give: take worker_group.name=ray"
            )
        super().__init__(sharding)
        context = WorkerContext(device=device, deadline=config.deadlines.call)
        self._worker: Any = load_target(spec.target)(**spec.kwargs, context=context)

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
