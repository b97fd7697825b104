"""What runs in a worker's process around the worker: find its class, compare plugins, construct it, call it.

Light: torch is imported by the worker's own module. Nothing here knows of Ray, which calls `WorkerHost` as an actor.
"""

from __future__ import annotations

import os
import random
import socket
from collections.abc import Sequence
from typing import Any

from rlframework.distributed.failures import HostFailure
from rlframework.errors import WorkerError
from rlframework.interfaces.worker_group import WorkerContext, WorkerSpec
from rlframework.plugins.loading import load_target

_LOOPBACK = "127.0.0.1"
_LOWEST_PORT = 20000


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

    def pid(self) -> int:
        """The process id; an answer also says that the process is up."""
        return os.getpid()

    def reserve_address(self) -> tuple[str, int] | HostFailure:
        """An address for the process group, bound until the worker is constructed."""
        try:
            self._reserved = _bind_free_port()
        except OSError as error:
            return HostFailure.of(error)
        address, port = self._reserved.getsockname()
        return str(address), int(port)

    def start(self, spec: WorkerSpec, context: WorkerContext) -> HostFailure | None:
        """Compare plugins, import the worker's module and construct the worker."""
        try:
            target = find_target(spec)
            if self._reserved is not None:
                self._reserved.close()
            self._worker = target(**spec.kwargs, context=context)
        except Exception as error:  # noqa: BLE001 - whatever it is, it goes to the driver
            return HostFailure.of(error)
        return None

    def call(self, method_name: str, wants_result: bool, names: Sequence[str], *values: Any) -> Any:
        """Call the worker; the result (None unless wanted, to save its way), or the `HostFailure`."""
        try:
            result = getattr(self._worker, method_name)(**dict(zip(names, values, strict=True)))
        except Exception as error:  # noqa: BLE001 - whatever it is, it goes to the driver
            return HostFailure.of(error)
        return result if wants_result else None


def _bind_free_port() -> socket.socket:
    """A bound socket on a free port below those that the kernel gives out by itself, so that no other connection of
    this machine takes it between its release here and its use.
    """
    highest = _first_ephemeral_port() - 1
    dice = random.SystemRandom()
    for _ in range(100):
        candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            candidate.bind((_LOOPBACK, dice.randint(_LOWEST_PORT, highest)))
        except OSError:
            candidate.close()
        else:
            return candidate
    raise WorkerError(f"no free port between {_LOWEST_PORT} and {highest} on {_LOOPBACK} in 100 tries")


def _first_ephemeral_port() -> int:
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            first = int(file.read().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux: IANA's range
        return 49152
    return first if first > _LOWEST_PORT + 1000 else 61000
