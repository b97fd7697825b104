"""Memory that another process of this machine can open, and that is gone when nobody has it any more.

A `memfd` has no name in any folder: the other process opens it by this one's id and file number. So there is nothing to
clean up, however either side ends. Linux only.
"""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlframework.errors import NotSupported, RefitError
from rlframework.policy.refit.free_memory import BUFFERS


@dataclass(frozen=True)
class MemoryHandle:
    """Where the memory is to be found: process, file number, and what tells it from another that has the number."""

    pid: int
    file: int
    inode: int
    size: int


class SharedMemory:
    """`size` bytes of this process; `raw` is uint8 of one dimension."""

    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise NotSupported(
                "sharing weights with another process needs Linux; set generation.refit.transport to collective"
            )
        self._file = os.memfd_create("rlframework-refit")
        try:
            os.posix_fallocate(self._file, 0, size)  # told now where there is no room, not by a signal later
            self._mapped = mmap.mmap(self._file, size)
        except OSError as error:
            os.close(self._file)
            raise RefitError(
                f"there is no memory for {size / 2**20:,.0f} MiB of shared weights ({error}); set a smaller "
                "generation.refit.buffer_mb"
            ) from error
        self.raw: Tensor = torch.from_numpy(np.frombuffer(self._mapped, dtype=np.uint8))
        self.handle = MemoryHandle(os.getpid(), self._file, os.fstat(self._file).st_ino, size)

    def close(self) -> None:
        """Let go of it; a process that has it open keeps it."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1


class OpenedMemory:
    """Memory of other processes that was opened here: as much of the last as is used in turn."""

    def __init__(self) -> None:
        self._open: dict[MemoryHandle, Tensor] = {}

    def open(self, handle: MemoryHandle) -> Tensor:
        """Its bytes, uint8 of one dimension; a `RefitError` where the other process or its memory is gone."""
        if handle not in self._open:
            self._open[handle] = _opened(handle)
            while len(self._open) > BUFFERS:
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
