"""Ports for process groups, reserved from the moment they are handed out until they are no longer needed.

A port that was only looked up can be taken by another process before it is used. A reserved port is held by a bound
socket, below the kernel's ephemeral range: no other socket can bind it, except one that requests exactly this port with
SO_REUSEADDR, as the stores of `torch.distributed` do.
"""

from __future__ import annotations

import random
import socket
import sys
from pathlib import Path

from rlframework.errors import WorkerError

_LOWEST_PORT = 20000


def first_ephemeral_port() -> int:
    """The first port of the kernel's ephemeral range."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux: IANA's range
        return 49152
    return first if first > _LOWEST_PORT + 1000 else 61000


def bind_free_port(address: str) -> socket.socket:
    """Return a socket bound to a free port of `address`.

    The port is below the ephemeral range, so that no other connection of this machine takes it between its release and
    its use. Raises `WorkerError` if no free port is found.
    """
    highest = first_ephemeral_port() - 1
    for port in random.SystemRandom().sample(range(_LOWEST_PORT, highest + 1), 100):
        candidate = socket.socket()
        try:
            candidate.bind((address, port))
        except OSError:
            candidate.close()
        else:
            return candidate
    raise WorkerError(f"found no free port between {_LOWEST_PORT} and {highest} on {address} in 100 attempts")


def reserve_port(address: str) -> socket.socket:
    """Return a socket that reserves a free port of `address`, an address of this machine, until it is closed."""
    reserved = bind_free_port(address)
    # set only after binding: a socket bound with this option could share the port of another socket that also has it
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return reserved


class PortReserver:
    """Reserves ports of the machine it runs on. Cheap to construct; runs as an actor to reserve them elsewhere."""

    def __init__(self) -> None:
        self._reserved: list[socket.socket] = []

    def reserve(self, address: str) -> int:
        """Return a free port of `address`, reserved for the lifetime of this object (except on macOS)."""
        reserved = reserve_port(address)
        port = int(reserved.getsockname()[1])
        if sys.platform == "linux":
            self._reserved.append(reserved)
        else:  # where the option does not let another socket bind the port
            reserved.close()
        return port
