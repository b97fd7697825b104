"""`WorkerHost`: runs in a worker's process, where it compares plugins and finds, constructs and calls the worker.

Imports neither torch, which the worker's own module imports, nor Ray, which runs a `WorkerHost` as an actor.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Sequence
from typing import Any

from rlframework.interfaces.worker_group import WorkerContext, WorkerSpec
from rlframework.logs import log_to_stderr
from rlframework.plugins.loading import load_target
from rlframework.workers import machine
from rlframework.workers.failures import HostFailure
from rlframework.workers.ports import bind_free_port

_LOOPBACK = "127.0.0.1"


def find_target(spec: WorkerSpec) -> Any:
    """The class of the worker, looked up among the plugins that this process discovers.

    Raises `PluginError` if they differ from the driver's plugins.
    """
    if spec.fingerprint is None:
        return load_target(spec.target)
    from rlframework.plugins.manager import create_manager

    manager = create_manager(modules=spec.plugins)
    manager.compare_fingerprint(spec.fingerprint)
    return load_target(manager.select(*spec.part).record.target if spec.part else spec.target)


class WorkerHost:
    """Hosts one worker. Cheap to construct; `start` constructs the worker. Failures are returned, never raised."""

    def __init__(self) -> None:
        log_to_stderr()
        self._worker: Any = None
        self._reserved: socket.socket | None = None

    def pid(self) -> tuple[int, str]:
        """The process id and its `machine.identity`. A reply also shows that the process is up."""
        return os.getpid(), machine.identity()

    def reserve_address(self, address: str = _LOOPBACK) -> tuple[str, int] | HostFailure:
        """Reserve a port of `address`, an address of this machine, until the worker's class is loaded; return both."""
        try:
            self._reserved = bind_free_port(address)
        except OSError as error:
            return HostFailure.of(error)
        found, port = self._reserved.getsockname()
        return str(found), int(port)

    def start(self, spec: WorkerSpec, context: WorkerContext) -> HostFailure | None:
        """Compare plugins, import the worker's module and construct the worker. Returns None on success."""
        try:
            target = find_target(spec)
            if self._reserved is not None:
                self._reserved.close()
            if context.node and "GLOO_SOCKET_IFNAME" not in os.environ and (name := machine.interface_of(context.node)):
                os.environ["GLOO_SOCKET_IFNAME"] = (
                    name  # else gloo listens at the address that the host name resolves to
                )
            self._worker = target(**spec.kwargs, context=context)
        except Exception as error:  # noqa: BLE001 - every exception is sent to the driver
            return HostFailure.of(error)
        return None

    def forget(self) -> None:
        """Drop a worker that was shut down, so that this process can `start` another."""
        self._worker = None
        gc.collect()

    def call(self, method_name: str, wants_result: bool, names: Sequence[str], *values: Any) -> Any:
        """Call the worker; return a `HostFailure`, or the result if `wants_result` (None saves the transfer)."""
        try:
            result = getattr(self._worker, method_name)(**dict(zip(names, values, strict=True)))
        except Exception as error:  # noqa: BLE001 - every exception is sent to the driver
            return HostFailure.of(error)
        return result if wants_result else None
