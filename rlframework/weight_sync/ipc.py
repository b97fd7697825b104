"""IPC: groups of weights in memory shared by processes on one machine (CPU) or on one GPU.

On a CPU an engine may offer the memory of its own weights as a receive buffer: the trainer writes there, and the engine
only verifies checksums. Otherwise the trainer rotates three buffers, so that it writes one group while earlier ones are
read; a group must have been read before the third group after it is requested.

Memory on a CPU is a `memfd`, which has no path: the other process opens it by this process's id and file descriptor,
and the system frees it after its last user, however either process ends. Linux only. Memory on a GPU is shared through
CUDA IPC handles.
"""

from __future__ import annotations

import mmap
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any
from uuid import uuid4
from weakref import finalize

import numpy as np
import torch
from torch import Tensor

from rlframework.base.errors import NotSupported, RefitError
from rlframework.observers.host import available_memory
from rlframework.weight_sync import buffers
from rlframework.weight_sync.buffers import Slot, WeightInfo
from rlframework.workers.device import without_expandable_segments
from rlframework.workers.machine import identity

BUFFERS = 3  # groups of weights in memory at the same time

CPU_GROUP, GPU_GROUP = 32 << 20, 1 << 30
"""Default bytes per group. A group on a CPU is small enough to stay in its caches between the two copies."""

OFFERED_GROUP = 128 << 20
"""Default bytes per group written straight into an engine's memory: large, as it needs no buffers and saves calls."""

_USABLE = 0.8  # fraction of the free memory that a refit may use
GPU_PREFIX = "GPU-"  # prefix of the device ids of GPUs
_CUDA_DEVICE = 6  # index of the device number among the arguments of torch's `rebuild_cuda_tensor`


def share_gpu(trainer: Set[str], engines: Set[str]) -> bool:
    """Return whether an engine runs on a GPU of the trainer, or may, because its device is unknown (`""`)."""
    return any(device.startswith(GPU_PREFIX) for device in (trainer if "" in engines else trainer & engines))


@cache
def device_id(device: torch.device) -> str:
    """Return the id of the GPU or machine of `device`; processes with equal ids can share memory on it."""
    if device.type == "cuda":
        return f"{GPU_PREFIX}{torch.cuda.get_device_properties(device).uuid}"
    return f"{device.type} {identity()}"


def free_bytes(device: torch.device) -> float:
    """Return the bytes that each of `BUFFERS` groups of weights may use on `device`."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    return float("inf") if free is None else free * _USABLE / BUFFERS


def group_bytes(buffer_mb: float | None, device: torch.device) -> float:
    """Return the bytes per group: `generation.refit.buffer_mb` or the default, limited by free memory."""
    default = GPU_GROUP if device.type == "cuda" else CPU_GROUP
    return min(free_bytes(device), default if buffer_mb is None else buffer_mb * 2**20)


# -- memory ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryHandle:
    """Identifies shared memory: process and file descriptor, with the inode to detect a reused descriptor."""

    pid: int
    file: int
    inode: int
    size: int


class SharedMemory:
    """`size` shareable bytes; `raw` is 1-D uint8.

    The file is closed with this object; processes that opened the memory, and tensors stored in it, keep it alive.
    """

    def __init__(self, size: int) -> None:
        if not hasattr(os, "memfd_create"):
            raise NotSupported(
                "sharing weights with another process needs Linux; set generation.refit.transport to collective"
            )
        file = os.memfd_create("rlframework-refit")
        finalize(self, os.close, file)
        try:
            os.posix_fallocate(file, 0, size)  # fails here if memory is short, not by SIGBUS later
            self.raw = _mapped(file, size)
        except OSError as error:
            raise RefitError(
                f"cannot allocate {size / 2**20:,.0f} MiB of shared memory for weights ({error}); set a smaller "
                "generation.refit.buffer_mb, or generation.refit.transport to collective"
            ) from error
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
    memory, offset = SharedMemory(max(1, sum(buffers.aligned(tensor.nbytes) for tensor in moving))), 0
    for tensor in moving:
        moved = memory.raw[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        moved.copy_(tensor)
        tensor.data = moved
        offset += buffers.aligned(tensor.nbytes)
    return memory


@lru_cache(BUFFERS)
def open_shared(handle: MemoryHandle) -> Tensor:
    """Return `open_memory(handle)`, the same for the last `BUFFERS` handles."""
    return open_memory(handle)


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
        return _mapped(file, handle.size)
    finally:
        os.close(file)


def _mapped(file: int, size: int) -> Tensor:
    return torch.from_numpy(np.frombuffer(mmap.mmap(file, size), dtype=np.uint8))


class CudaMemory:
    """`size` bytes on a GPU, 1-D uint8 in `raw`, that other processes can open."""

    def __init__(self, size: int, device: torch.device) -> None:
        with without_expandable_segments():
            self.raw = torch.empty(size, dtype=torch.uint8, device=device)

    @property
    def handle(self) -> CudaHandle:
        """A handle for what has been written so far."""
        torch.cuda.synchronize(self.raw.device)
        return CudaHandle(self.raw)


class CudaHandle:
    """Identifies memory on a GPU: the memory itself in its own process, elsewhere what torch needs to open it.

    CUDA does not open shared memory in the process that owns it. Torch keeps memory that it has shared until it was
    opened, so it is shared when the handle is pickled, and not if it stays in the process.
    """

    def __init__(self, own: Tensor | None, rebuild: Callable[..., Tensor] | None = None, *arguments: Any) -> None:
        self._own, self._shared = own, (rebuild, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        from torch.multiprocessing.reductions import reduce_tensor

        rebuild, arguments = self._shared if self._own is None else reduce_tensor(self._own)
        return CudaHandle, (None, rebuild, *arguments)

    def open(self, device: torch.device) -> Tensor:
        """Return the memory; this process may number the GPU differently."""
        if self._own is not None:
            return self._own
        rebuild, arguments = self._shared
        assert rebuild is not None
        numbered = [*arguments[:_CUDA_DEVICE], device.index or 0, *arguments[_CUDA_DEVICE + 1 :]]
        return rebuild(*numbered)


# -- groups of weights -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupHandles:
    """A group of weights in shared memory. `refit` identifies the refit that the group belongs to."""

    refit: str
    slots: tuple[Slot, ...]
    checksums: tuple[int, ...]
    memory: MemoryHandle | CudaHandle


@dataclass(frozen=True)
class ReceiveBuffer:
    """A receiver's memory and the offset of each weight in it. `layout`: checksum of the layout it expects."""

    memory: MemoryHandle
    layout: int
    offsets: Mapping[str, int]


class IpcSender:
    """The trainer's side: writes groups of weights to rotating buffers, or to a receiver's buffer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: deque[SharedMemory | CudaMemory] = deque()
        self.receive_buffer: ReceiveBuffer | None = None
        self._devices: Collection[str] | None = None
        self._open = lru_cache(1)(open_memory)
        self.info: WeightInfo = {}
        self.refit = ""

    def begin(
        self,
        info: WeightInfo,
        receive_buffer: ReceiveBuffer | None = None,
        devices: Collection[str] | None = None,
    ) -> None:
        """Begin a refit of the weights `info`, which `pack` writes to `receive_buffer` if given.

        `devices`: the devices of the engines; None if unknown. Raises `RefitError` if the buffer was laid out for other
        weights.
        """
        self._devices = devices
        if receive_buffer is not None and receive_buffer.layout != buffers.layout_checksum(info):
            raise RefitError(
                "an engine offered a receive buffer for weights other than the trainer's: call its begin_weight_update "
                "with them"
            )
        current = self.receive_buffer
        if receive_buffer is None or current is None or receive_buffer.memory != current.memory:
            self.close()
        self.info, self.receive_buffer, self.refit = info, receive_buffer, uuid4().hex

    @property
    def wanted(self) -> bool:
        """Whether an engine may open this device's memory; torch keeps shared memory that is never opened."""
        return self._devices is None or device_id(self._device) in self._devices

    def pack(self, names: Iterable[str], weights: Iterator[tuple[str, Tensor]]) -> GroupHandles:
        """Write `weights`, given in the order of `names`, and return their handles."""
        slots = buffers.assign_slots(names, self.info)
        offered = self.receive_buffer
        if offered is not None:
            slots = [replace(slot, offset=offered.offsets[slot.name]) for slot in slots]
        else:
            size = max((slot.offset + slot.size for slot in slots), default=0)
            self._next_buffer(max(1, size))  # memory cannot be empty
        raw = self.written()
        matched = buffers.match_slots(slots, weights)
        sums = tuple(buffers.write_weight(slot.of(raw), weight, slot.dtype) for slot, weight in matched)
        memory = self._buffers[0].handle if offered is None else offered.memory
        return GroupHandles(self.refit, tuple(slots), sums, memory)

    def written(self) -> Tensor:
        """Return the memory of the last group, 1-D uint8."""
        return self._buffers[0].raw if self.receive_buffer is None else self._open(self.receive_buffer.memory)

    def _next_buffer(self, size: int) -> None:
        """Make the next buffer of the rotation the first, reallocated if it is too small."""
        if len(self._buffers) == BUFFERS:
            self._buffers.rotate()
            if self._buffers[0].raw.numel() >= size:
                return
            self._buffers.popleft()
        on_gpu = self._device.type == "cuda"
        self._buffers.appendleft(CudaMemory(size, self._device) if on_gpu else SharedMemory(size))

    def close(self) -> None:
        """Release the buffers and a receiver's memory."""
        self._buffers.clear()
        self._open.cache_clear()
