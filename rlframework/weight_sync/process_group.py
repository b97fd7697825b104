"""The process group of a collective refit: trainer rank 0 and the receivers, separate from either side's own groups.

gloo between CPUs, NCCL between GPUs. Every wait has a deadline; after a failure the group is unusable and is closed.
"""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.errors import RefitError

_BACKLOG = 1024
"""Connections the store's socket queues before accepting them: all receivers connect at once."""


class RefitGroup:
    """Rank `rank` of `world_size`. Rank 0, the sender, serves the store at `ip` and `port`.

    `listening`: a socket already bound to that address. Raises `RefitError` if the ranks do not meet within `deadline`
    seconds.
    """

    def __init__(
        self,
        ip: str,
        port: int,
        rank: int,
        world_size: int,
        device: torch.device,
        deadline: float,
        listening: socket.socket | None = None,
    ) -> None:
        self.rank, self.size, self.deadline, self.device = rank, world_size, deadline, device
        self._group: Any = None
        try:
            self._store = self._connect_store(ip, port, listening)
            self._group = self._process_group(ip, port)
            # connections are made at the first collective, so a missing rank is reported now
            self.wait(self.all_reduce(torch.zeros(1, dtype=torch.int64, device=device)), "connecting")
        except (RuntimeError, OSError) as error:
            raise RefitError(
                f"rank {rank} of {world_size} could not form the process group of the refit at {ip}:{port} within "
                f"{deadline:g} s (generation.refit.deadline): {_first_line(error)}"
            ) from error

    def _connect_store(self, ip: str, port: int, listening: socket.socket | None) -> Any:
        untyped: Any = dist
        served = None
        if self.rank == 0:
            bound = listening or socket.create_server((ip, port), family=_family(ip))
            bound.listen(_BACKLOG)
            served = bound.detach()  # the store closes it
        return untyped.TCPStore(
            ip,
            port,
            world_size=self.size,
            is_master=self.rank == 0,
            timeout=timedelta(seconds=self.deadline),
            wait_for_workers=False,
            master_listen_fd=served,
        )

    def _process_group(self, ip: str, port: int) -> Any:
        untyped: Any = dist
        if self.device.type == "cuda":
            kind = untyped.ProcessGroupNCCL
            options = kind.Options()
        else:
            kind = untyped.ProcessGroupGloo
            options = kind._Options()
            options._devices = [kind.create_device(hostname=_own_address(ip, port) if self.rank else ip)]
        options._timeout = timedelta(seconds=self.deadline)
        return kind(self._store, self.rank, self.size, options)

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Start sending `tensor` from rank 0 to the others; pass the result to `wait`."""
        work: dist.Work = self._group.broadcast(tensor, 0)
        return work

    def all_reduce(self, tensor: Tensor) -> dist.Work:
        """Start summing `tensor` over the ranks, in place; pass the result to `wait`."""
        work: dist.Work = self._group.allreduce(tensor)
        return work

    def wait(self, work: dist.Work, what: str) -> None:
        """Wait for `work`; close the group and raise `RefitError` if a rank is gone or the deadline passes."""
        try:
            if self.device.type == "cuda":
                self._poll(work)
            else:
                work.wait(timedelta(seconds=self.deadline))
        except RuntimeError as error:
            self.close()
            who = "a receiver is gone or took too long" if self.rank == 0 else "the trainer is gone or took too long"
            raise RefitError(
                f"{what}: {who} (generation.refit.deadline is {self.deadline:g} s): {_first_line(error)}"
            ) from error

    def _poll(self, work: dist.Work) -> None:
        """Poll instead of waiting: NCCL's own time-outs abort the process."""
        until = time.monotonic() + self.deadline
        while not work.is_completed():
            if time.monotonic() > until:
                raise RuntimeError("deadline exceeded")
            time.sleep(0.001)

    @property
    def closed(self) -> bool:
        """True after `close` or a failure."""
        return self._group is None

    def close(self) -> None:
        """Release the group; the other ranks notice."""
        group, self._group = self._group, None
        if group is not None and self.device.type == "cuda":
            with suppress(RuntimeError):
                group.abort()


def _own_address(ip: str, port: int) -> str:
    """Return this machine's address on the route to the sender, where the other ranks can reach this process."""
    with socket.socket(_family(ip), socket.SOCK_DGRAM) as probe:
        probe.connect((ip, port))  # UDP: sends nothing
        return str(probe.getsockname()[0])


def _family(ip: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in ip else socket.AF_INET


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
