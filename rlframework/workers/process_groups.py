"""The default process group of a worker process, the rendezvous at which its ranks form it, and work on all of them.

`join` creates the group on first use and `leave` destroys it after the last: several inline policies may share a
process, and torch has one default group per process.

With `init_method="tcp://..."`, rank 0 would listen at all addresses of its machine. `process_store` listens only at the
address in the worker's context: loopback, or with several machines the address of its node in the cluster.

`run_on_all_ranks` and `exhausting` are for work that either succeeds on all ranks or raises on all of them.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from rlframework.base.errors import DataError, RLFrameworkError, UserError, WriteError
from rlframework.interfaces.worker_group import WorkerContext

_BACKLOG = 1024
"""Length of the queue of connections to accept, because all ranks connect at once."""

_users = 0
_created_by_join = False


def join(context: WorkerContext, device: torch.device) -> None:
    """Register a user of the default process group; create the group (NCCL on a GPU, otherwise gloo) if needed."""
    global _users, _created_by_join  # torch's default group is global too
    if not dist.is_initialized():
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=HashStore() if context.world_size == 1 else process_store(context),  # alone: no port, no peers
            rank=context.rank,
            world_size=context.world_size,
            timeout=timedelta(seconds=context.deadline),
        )
        _created_by_join = True
    _users += 1


def leave() -> None:
    """Unregister a user of the group. After the last one, destroy the group if `join` created it."""
    global _users, _created_by_join
    _users -= 1
    if _users or not _created_by_join or not dist.is_initialized():
        return
    if dist.get_world_size() > 1:
        dist.barrier()  # gloo occasionally aborts the process if a peer leaves first
    dist.destroy_process_group()
    _created_by_join = False


def process_store(context: WorkerContext) -> TCPStore:
    """The store to pass to `torch.distributed.init_process_group(store=..., rank=..., world_size=...)`.

    Rank 0 serves it at `context.master_addr` and `master_port`; the other ranks connect, and raise `TimeoutError` if
    rank 0 does not serve it within `context.deadline` seconds.
    """
    address, port = context.master_addr, context.master_port
    listener = None
    if context.rank == 0:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, port), family=family, backlog=_BACKLOG).detach()  # the store's
    else:
        _wait_until_served(address, port, context.deadline)
    return TCPStore(
        address,
        port,
        world_size=context.world_size,
        is_master=context.rank == 0,
        timeout=timedelta(seconds=context.deadline),
        wait_for_workers=False,
        master_listen_fd=listener,
    )


def _wait_until_served(address: str, port: int, seconds: float) -> None:
    """Wait until a server listens there, at most `seconds`.

    The store itself would try once, and if rank 0 is not up yet sleep for up to a second before the next attempt.
    """
    until, pause = time.monotonic() + seconds, 0.002
    while (left := until - time.monotonic()) > 0:
        try:
            socket.create_connection((address, port), left).close()
            return
        except OSError:
            time.sleep(min(pause, left))
            pause = min(2 * pause, 0.05)
    raise TimeoutError(
        f"rank 0 did not serve the process group at {address}:{port} within {seconds:g} s (deadlines.call): check "
        "whether rank 0 failed, and whether this machine can reach that address"
    )


T = TypeVar("T")
_KEPT = (DataError, UserError, WriteError)


def run_on_all_ranks(context: WorkerContext, work: Callable[[], T]) -> list[T]:
    """Run `work` (no collective) on each rank, and return the results of all ranks, by rank. Collective.

    A rank whose work fails raises its own error; the others raise one that names the rank, of type `DataError`,
    `UserError` or `WriteError` if the original error was one, else `RLFrameworkError`.
    """
    if context.world_size == 1:
        return [work()]
    outcome: tuple[Any, str, type[Exception]]
    failure: Exception | None = None
    try:
        outcome = (work(), "", RLFrameworkError)
    except Exception as error:  # noqa: BLE001 - raised below, once the other ranks know
        failure = error
        raised_as = next((kind for kind in _KEPT if isinstance(error, kind)), RLFrameworkError)
        outcome = (None, f"{type(error).__name__}: {error}", raised_as)
    outcomes: list[Any] = [None] * context.world_size
    torch.distributed.all_gather_object(outcomes, outcome)
    if failure is not None:
        raise failure
    for rank, (_, message, raised_as) in enumerate(outcomes):
        if message:
            raise raised_as(f"rank {rank}: {message}")
    return [value for value, _, _ in outcomes]


@contextmanager
def exhausting(items: Iterator[object]) -> Iterator[None]:
    """Exhaust `items` at the end of the block, even on failure: reading them is a collective."""
    try:
        yield
    finally:
        for _ in items:
            pass
