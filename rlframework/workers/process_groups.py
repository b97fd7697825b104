"""The process group that the workers of a process share: made by the first that needs it, destroyed by the last.

Several inline policies may live in one process; torch has one default group a process.
"""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from rlframework.interfaces.worker_group import WorkerContext
from rlframework.workers.rendezvous import process_store

_users = 0
_ours = False


def join(context: WorkerContext, device: torch.device) -> None:
    """Make the default process group (NCCL on a GPU, gloo elsewhere) unless it is there; one more user of it."""
    global _users, _ours  # torch's default group is global too
    if not dist.is_initialized():
        _make(context, device)
        _ours = True
    _users += 1


def leave() -> None:
    """One user less; after the last, the group goes if it was made here."""
    global _users, _ours
    _users -= 1
    if _users or not _ours or not dist.is_initialized():
        return
    if dist.get_world_size() > 1:
        dist.barrier()  # gloo aborts the process now and then when a peer leaves first
    dist.destroy_process_group()
    _ours = False


def _make(context: WorkerContext, device: torch.device) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if context.world_size == 1:  # no port, no peers
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
        return
    dist.init_process_group(
        backend,
        store=process_store(context),
        rank=context.rank,
        world_size=context.world_size,
        timeout=timedelta(seconds=context.deadline),
    )
