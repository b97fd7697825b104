"""`InlineWorkerGroup`: one worker in the driver's own process, without Ray or threads, so that a debugger works."""

from __future__ import annotations

import logging
from typing import Any

from rlframework.base.errors import ConfigError, WorkerError
from rlframework.config.sections import WorkerGroupConfig
from rlframework.interfaces.named_sharding import NamedSharding
from rlframework.interfaces.worker_group import MultiWorkerFuture, WorkerContext, WorkerSpec
from rlframework.plugins.discovery import load_target
from rlframework.workers import dispatch

_LOG = logging.getLogger(__name__)


class InlineWorkerGroup(dispatch.DispatchingWorkerGroup):
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
        dispatch.reject_own_python(spec, "inline")
        super().__init__(sharding)
        context = WorkerContext(device=device, deadline=config.deadlines.call)
        self._worker: Any = load_target(spec.target)(**spec.kwargs, context=context)

    def get_all_worker_results(self, future: MultiWorkerFuture) -> list[Any]:
        """Return the results, which are available already."""
        return dispatch.select_results(future, future.futures)

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

    def _run(self, method_name: str, plan: dispatch.Dispatch) -> MultiWorkerFuture:
        if self._worker is None:
            raise WorkerError(f"{method_name} was called on a worker group that has been shut down")
        (kwargs,) = plan.kwargs
        result = getattr(self._worker, method_name)(**kwargs)
        return MultiWorkerFuture([result], return_from_workers=plan.returned, called_workers=plan.called)
