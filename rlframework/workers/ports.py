"""Ports for process groups: kept from the moment that they are given out until they are no longer needed.

A port that was only looked up can be taken by somebody else before it is used. Here a socket stays bound to it, on a
port below those that the kernel gives out by itself: no other socket can have it, except one that asks for exactly this
port with SO_REUSEADDR, as the stores of `torch.distributed` do.
"""

from __future__ import annotations

import random
import socket

from rlframework.errors import WorkerError

_LOWEST_PORT = 20000


def bind_free_port(address: str) -> socket.socket:
    """A socket bound on `address` to a free port below those that the kernel gives out by itself, so that no other
    connection of this machine takes it between its release here and its use.
    """
    highest = first_ephemeral_port() - 1
    dice = random.SystemRandom()
    for _ in range(100):
        candidate = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        try:
            candidate.bind((address, dice.randint(_LOWEST_PORT, highest)))
        except OSError:
            candidate.close()
        else:
            return candidate
    raise WorkerError(f"no free port between {_LOWEST_PORT} and {highest} on {address} in 100 tries")


def first_ephemeral_port() -> int:
    """The first of the ports that the kernel gives out by itself."""
    try:
        with open("/proc/sys/net/ipv4/ip_local_port_range") as file:
            first = int(file.read().split()[0])
    except (OSError, ValueError, IndexError):  # not Linux: IANA's range
        return 49152
    return first if first > _LOWEST_PORT + 1000 else 61000


def keep_port(address: str) -> socket.socket:
    """A socket that keeps a free port of `address`, an address of this machine, until it is closed."""
    kept = bind_free_port(address)
    # set afterwards: a socket that is bound with it would share the port of another that has it
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    return kept


class PortKeeper:
    """Keeps ports of the machine that it runs on. Cheap; an actor where the machine is another."""

    def __init__(self) -> None:
        self._kept: list[socket.socket] = []

    def keep(self, address: str) -> int:
        """A free port of `address`, kept until this object ends."""
        self._kept.append(keep_port(address))
        return int(self._kept[-1].getsockname()[1])
