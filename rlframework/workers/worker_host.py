"""`WorkerHost`: runs in a worker's process, where it compares plugins and finds, constructs and calls the worker.

Imports neither torch, which the worker's own module imports, nor Ray, which runs a subclass as an actor.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Sequence
from typing import Any

from rlframework.interfaces.worker_group import WorkerContext, WorkerSpec
from rlframework.logs import log_to_stderr
from rlframework.plugins.loading import load_target
from rlframework.workers import machine
from rlframework.workers.ports import PortReserver


def find_target(spec: WorkerSpec) -> str:
    """The import path of the worker's class, looked up among the plugins that this process discovers.

    Raises `PluginError` if they differ from the driver's plugins.
    """
    if spec.fingerprint is None:
        return spec.target
    from rlframework.plugins.manager import create_manager

    manager = create_manager(modules=spec.plugins)
    manager.compare_fingerprint(spec.fingerprint)
    return manager.select(*spec.part).record.target if spec.part else spec.target


class WorkerHost(PortReserver):
    """Hosts one worker. Cheap to construct; `start` imports the worker's module and constructs the worker."""

    def __init__(self) -> None:
        super().__init__()
        log_to_stderr()
        self._worker: Any = None

    def pid(self) -> tuple[int, str]:
        """The process id and its `machine.identity`. A reply also shows that the process is up."""
        return os.getpid(), machine.identity()

    def start(self, spec: WorkerSpec, context: WorkerContext) -> None:
        """Compare plugins, import the worker's module and construct the worker."""
        worker_class = load_target(find_target(spec))
        machine.listen_for_gloo_at(context.node)
        self._worker = worker_class(**spec.kwargs, context=context)

    def forget(self) -> None:
        """Drop a worker that was shut down, so that this process can `start` another."""
        self._worker = None
        gc.collect()

    def call(self, method_name: str, wants_result: bool, names: Sequence[str], *values: Any) -> Any:
        """Call the worker; return its result if `wants_result`, otherwise None, which saves the transfer."""
        result = getattr(self._worker, method_name)(**dict(zip(names, values, strict=True)))
        return result if wants_result else None
