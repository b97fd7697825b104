"""What runs in a worker's process around the worker: find its class, compare plugins, construct it, call it.

Light: torch is imported by the worker's own module. Nothing here knows of Ray, which calls `WorkerHost` as an actor.
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Sequence
from typing import Any

from rlframework.interfaces.worker_group import WorkerContext, WorkerSpec
from rlframework.plugins.loading import load_target
from rlframework.workers import machine
from rlframework.workers.failures import HostFailure
from rlframework.workers.ports import bind_free_port

_LOOPBACK = "127.0.0.1"


def find_target(spec: WorkerSpec) -> Any:
    """The class of the worker, by name among the plugins that this process finds itself.

    They are compared with the driver's first: a difference is a `PluginError`.
    """
    if spec.fingerprint is None:
        return load_target(spec.target)
    from rlframework.plugins.manager import create_manager

    manager = create_manager(modules=spec.plugins)
    manager.compare_fingerprint(spec.fingerprint)
    return load_target(manager.select(*spec.part).record.target if spec.part else spec.target)


class WorkerHost:
    """Holds one worker. Cheap to construct; `start` makes the worker. Nothing raises: failures are values."""

    def __init__(self) -> None:
        self._worker: Any = None
        self._reserved: socket.socket | None = None

    def pid(self) -> tuple[int, str]:
        """The process id and its machine's `machine.identity`; an answer also says that the process is up."""
        return os.getpid(), machine.identity()

    def reserve_address(self, address: str = _LOOPBACK) -> tuple[str, int] | HostFailure:
        """A port of `address`, one of this machine's, for the process group; bound until the worker is constructed."""
        try:
            self._reserved = bind_free_port(address)
        except OSError as error:
            return HostFailure.of(error)
        found, port = self._reserved.getsockname()
        return str(found), int(port)

    def start(self, spec: WorkerSpec, context: WorkerContext) -> HostFailure | None:
        """Compare plugins, import the worker's module and construct the worker."""
        try:
            target = find_target(spec)
            if self._reserved is not None:
                self._reserved.close()
            if context.node and "GLOO_SOCKET_IFNAME" not in os.environ and (name := machine.interface_of(context.node)):
                os.environ["GLOO_SOCKET_IFNAME"] = name  # else it listens where the name of the host happens to lead
            self._worker = target(**spec.kwargs, context=context)
        except Exception as error:  # noqa: BLE001 - whatever it is, it goes to the driver
            return HostFailure.of(error)
        return None

    def forget(self) -> None:
        """Let go of a worker that was shut down, so that this process may `start` another."""
        self._worker = None
        gc.collect()

    def call(self, method_name: str, wants_result: bool, names: Sequence[str], *values: Any) -> Any:
        """Call the worker; the result (None unless wanted, to save its way), or the `HostFailure`."""
        try:
            result = getattr(self._worker, method_name)(**dict(zip(names, values, strict=True)))
        except Exception as error:  # noqa: BLE001 - whatever it is, it goes to the driver
            return HostFailure.of(error)
        return result if wants_result else None
