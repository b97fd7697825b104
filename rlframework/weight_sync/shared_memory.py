"""Memory that other processes on this machine can open and that the system frees after its last user.

A `memfd` has no path: the other process opens it by this process's id and file descriptor. So there is nothing to clean
up, however either process ends. Linux only.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterable
from dataclasses import dataclass
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from rlframework.errors import NotSupported, RefitError
from rlframework.weight_sync.buffers import aligned


@dataclass(frozen=True)
class MemoryHandle:
    """Identifies shared memory: process and file descriptor, with the inode to detect a reused descriptor."""

    pid: int
    file: int
    inode: int
    size: int


class SharedMemory:
    """`size` shareable bytes; `raw` is 1-D uint8. `remedy`: advice in the error if the memory cannot be allocated.

    The file is closed with this object; processes that opened the memory, and tensors stored in it, keep it alive.
    """

    def __init__(self, size: int, remedy: str = "set a smaller generation.refit.buffer_mb") -> None:
        if not hasattr(os, "memfd_create"):
            raise NotSupported(
                "sharing weights with another process needs Linux; set generation.refit.transport to collective"
            )
        file = os.memfd_create("rlframework-refit")
        finalize(self, os.close, file)
        try:
            os.posix_fallocate(file, 0, size)  # fails here if memory is short, not by SIGBUS later
            mapped = mmap.mmap(file, size)
        except OSError as error:
            raise RefitError(
                f"cannot allocate {size / 2**20:,.0f} MiB of shared memory for weights ({error}); {remedy}"
            ) from error
        self.raw: Tensor = torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))
        self.handle = MemoryHandle(os.getpid(), file, os.fstat(file).st_ino, size)

    def offset(self, tensor: Tensor) -> int:
        """Return the byte offset of `tensor`, which must be stored here."""
        return tensor.data_ptr() - self.raw.data_ptr()

    def contains(self, tensor: Tensor) -> bool:
        """Return True if `tensor` is stored here."""
        return tensor.is_cpu and 0 <= self.offset(tensor) <= self.raw.numel() - tensor.nbytes


@torch.no_grad()
def move_to_shared_memory(tensors: Iterable[Tensor]) -> SharedMemory:
    """Move the storage of contiguous CPU `tensors`, with their values, to new shared memory.

    The tensor objects stay the same, so modules keep their parameters. Needs a second copy of the values until it
    returns.
    """
    moving = list(tensors)
    size = max(1, sum(aligned(tensor.nbytes) for tensor in moving))
    memory = SharedMemory(size, "set generation.refit.transport to collective")
    offset = 0
    for tensor in moving:
        moved = memory.raw[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        moved.copy_(tensor)
        tensor.data = moved
        offset += aligned(tensor.nbytes)
    return memory


def open_memory(handle: MemoryHandle) -> Tensor:
    """Return the bytes of `handle`, 1-D uint8; raise `RefitError` if the other process or its memory is gone."""
    path = f"/proc/{handle.pid}/fd/{handle.file}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RefitError(
            f"cannot open the shared memory for weights ({error}): the process that owns it ended or closed it"
        ) from error
    try:
        found = os.fstat(file)
        if (found.st_ino, found.st_size) != (handle.inode, handle.size):
            raise RefitError(f"{path} is no longer the memory that was shared: its owner closed it before it was read")
        mapped = mmap.mmap(file, handle.size)
    finally:
        os.close(file)
    return torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))
