"""A process group of a refit: trainer rank 0 and the receivers, apart from the groups that either side trains with.

gloo between CPUs, NCCL between GPUs. Every wait has a deadline; after a failure the group is of no use and is closed.
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

_WAITING = 1024
"""Connections that may wait until they are taken: all receivers come at once."""


class RefitGroup:
    """Rank `rank` of `world_size`. Rank 0, the sender, serves the store at `ip` and `port`.

    `listening`: a socket that is bound there already.
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
            self._meet()
        except (RuntimeError, OSError) as error:
            raise RefitError(
                f"rank {rank} of {world_size} could not form the process group of the refit at {ip}:{port} within "
                f"{deadline:g} s (generation.refit.deadline): {_first_line(error)}"
            ) from error

    def _meet(self) -> None:
        """Connections are made when they are first used: here, so that whoever is not there is told now."""
        self.wait(self.add(torch.zeros(1, dtype=torch.int64, device=self.device)), "meeting")

    def broadcast(self, tensor: Tensor) -> Any:
        """Begin to send `tensor` from rank 0 to the others; for `wait`."""
        from torch.distributed import BroadcastOptions

        options: Any = BroadcastOptions()
        options.rootRank, options.rootTensor, options.timeout = 0, 0, timedelta(seconds=self.deadline)
        return self._group.broadcast([tensor], options)

    def add(self, tensor: Tensor) -> Any:
        """Begin to add up `tensor` over the ranks, in place; for `wait`."""
        from torch.distributed import AllreduceOptions

        options: Any = AllreduceOptions()
        options.timeout = timedelta(seconds=self.deadline)
        return self._group.allreduce([tensor], options)

    def wait(self, work: Any, what: str) -> None:
        """Until `work` is done, at most the deadline; a `RefitError` where it is not, or somebody is gone."""
        try:
            if self.device.type == "cuda":
                self._poll(work)
            else:
                work.wait(timedelta(seconds=self.deadline))
        except RuntimeError as error:
            self.close()
            who = "a receiver is gone, or took too long" if self.rank == 0 else "the trainer is gone, or took too long"
            raise RefitError(
                f"{what}: {who} (generation.refit.deadline is {self.deadline:g} s): {_first_line(error)}"
            ) from error

    def _poll(self, work: Any) -> None:
        """NCCL's own time-outs end the process."""
        until = time.monotonic() + self.deadline
        while not work.is_completed():
            if time.monotonic() > until:
                raise RuntimeError("time is over")
            time.sleep(0.001)

    @property
    def closed(self) -> bool:
        """Whether it is of no use any more."""
        return self._group is None

    def close(self) -> None:
        """Let go of the group; the others notice."""
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
        bound.listen(_WAITING)
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
    """The address of this machine that reaches the sender: others are to reach this process there, and nowhere else."""
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as asking:
        asking.connect((ip, port))  # nothing is sent
        return str(asking.getsockname()[0])


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:300]
