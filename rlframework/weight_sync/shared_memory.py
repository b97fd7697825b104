"""Memory that another process of this machine can open, and that is gone when nobody has it any more.

A `memfd` has no name in any folder: the other process opens it by this one's id and file number. So there is nothing to
clean up, however either side ends. Linux only.
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
    """Where the memory is to be found: process, file number, and what tells it from another that has the number."""

    pid: int
    file: int
    inode: int
    size: int


class SharedMemory:
    """`size` bytes of this process; `raw` is uint8 of one dimension. `remedy`: what to do where there is no room."""

    def __init__(self, size: int, remedy: str = "set a smaller generation.refit.buffer_mb") -> None:
        if not hasattr(os, "memfd_create"):
            raise NotSupported(
                "sharing weights with another process needs Linux; set generation.refit.transport to collective"
            )
        file = os.memfd_create("rlframework-refit")
        self._close = finalize(self, os.close, file)
        try:
            os.posix_fallocate(file, 0, size)  # told now where there is no room, not by a signal later
            mapped = mmap.mmap(file, size)
        except OSError as error:
            self.close()
            raise RefitError(
                f"there is no memory for {size / 2**20:,.0f} MiB of shared weights ({error}); {remedy}"
            ) from error
        self.raw: Tensor = torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))
        self.handle = MemoryHandle(os.getpid(), file, os.fstat(file).st_ino, size)

    def offset(self, tensor: Tensor) -> int:
        """Where `tensor`, which lies in it, begins."""
        return tensor.data_ptr() - self.raw.data_ptr()

    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` lies in it."""
        return tensor.is_cpu and 0 <= self.offset(tensor) <= self.raw.numel() - tensor.nbytes

    def close(self) -> None:
        """Let go of it; a process that has it open keeps it, and so do tensors that lie in it."""
        self._close()


@torch.no_grad()
def move_in(tensors: Iterable[Tensor]) -> SharedMemory:
    """Memory that contiguous `tensors` of the CPU lie in from now on, with the values that they have.

    They stay the objects that they are: whoever has one of them, as a module has its parameters, has it there. Until
    this returns there are two copies of the values.
    """
    all_of_them = list(tensors)
    size = max(1, sum(aligned(tensor.nbytes) for tensor in all_of_them))
    memory = SharedMemory(size, "set generation.refit.transport to collective")
    offset = 0
    for tensor in all_of_them:
        there = memory.raw[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        there.copy_(tensor)
        tensor.data = there
        offset += aligned(tensor.nbytes)
    return memory


class OpenedMemory:
    """Memory of other processes that was opened here: the last `most` of it."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: dict[MemoryHandle, Tensor] = {}

    def open(self, handle: MemoryHandle) -> Tensor:
        """Its bytes, uint8 of one dimension; a `RefitError` where the other process or its memory is gone."""
        if handle not in self._open:
            self._open[handle] = _opened(handle)
            while len(self._open) > self._most:
                del self._open[next(iter(self._open))]
        return self._open[handle]

    def close(self) -> None:
        """Let go of all of it."""
        self._open.clear()


def _opened(handle: MemoryHandle) -> Tensor:
    path = f"/proc/{handle.pid}/fd/{handle.file}"
    try:
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RefitError(
            f"the trainer's shared weights cannot be opened ({error}): its process ended, or let go"
        ) from error
    try:
        found = os.fstat(file)
        if (found.st_ino, found.st_size) != (handle.inode, handle.size):
            raise RefitError(f"{path} is not the memory that the trainer shared: it let go of that before it was read")
        mapped = mmap.mmap(file, handle.size)
    finally:
        os.close(file)
    return torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))
