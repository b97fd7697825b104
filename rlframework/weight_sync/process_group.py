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
            self._store = _store(ip, port, rank, world_size, deadline, listening)
            self._group = (_nccl if device.type == "cuda" else _gloo)(self._store, rank, world_size, ip, port, deadline)
            self._connect()
        except (RuntimeError, OSError) as error:
            raise RefitError(
                f"rank {rank} of {world_size} could not form the process group of the refit at {ip}:{port} within "
                f"{deadline:g} s (generation.refit.deadline): {_first_line(error)}"
            ) from error

    def _connect(self) -> None:
        """Run one collective: connections are made at first use, so a missing rank is reported now."""
        self.wait(self.all_reduce(torch.zeros(1, dtype=torch.int64, device=self.device)), "connecting")

    def broadcast(self, tensor: Tensor) -> Any:
        """Start sending `tensor` from rank 0 to the others; pass the result to `wait`."""
        from torch.distributed import BroadcastOptions

        options: Any = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=self.deadline)
        return self._group.broadcast([tensor], options)

    def all_reduce(self, tensor: Tensor) -> Any:
        """Start summing `tensor` over the ranks, in place; pass the result to `wait`."""
        from torch.distributed import AllreduceOptions

        options: Any = AllreduceOptions()
        options.timeout = timedelta(seconds=self.deadline)
        return self._group.allreduce([tensor], options)

    def wait(self, work: Any, what: str) -> None:
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

    def _poll(self, work: Any) -> None:
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


def _store(ip: str, port: int, rank: int, world_size: int, deadline: float, listening: socket.socket | None) -> Any:
    from torch._C._distributed_c10d import TCPStore

    served = None
    if rank == 0:
        family = socket.AF_INET6 if ":" in ip else socket.AF_INET
        bound = listening or socket.socket(family, socket.SOCK_STREAM)
        if listening is None:
            bound.bind((ip, port))
        bound.listen(_BACKLOG)
        served = bound.detach()  # the store closes it
    return TCPStore(
        ip,
        port,
        world_size=world_size,
        is_master=rank == 0,
        timeout=timedelta(seconds=deadline),
        wait_for_workers=False,
        master_listen_fd=served,
    )


def _gloo(store: Any, rank: int, world_size: int, ip: str, port: int, deadline: float) -> Any:
    from torch.distributed import ProcessGroupGloo

    kind: Any = ProcessGroupGloo
    options = kind._Options()
    options._devices = [kind.create_device(hostname=_own_address(ip, port) if rank else ip)]
    options._timeout = timedelta(seconds=deadline)
    return kind(store, rank, world_size, options)


def _nccl(store: Any, rank: int, world_size: int, ip: str, port: int, deadline: float) -> Any:
    from torch.distributed import ProcessGroupNCCL

    kind: Any = ProcessGroupNCCL
    options = kind.Options()
    options._timeout = timedelta(seconds=deadline)
    return kind(store, rank, world_size, options)


def _own_address(ip: str, port: int) -> str:
    """Return this machine's address on the route to the sender, where the other ranks can reach this process."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((ip, port))  # UDP: sends nothing
        return str(probe.getsockname()[0])


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
