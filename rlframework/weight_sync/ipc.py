"""IPC: groups of weights in memory shared by processes on one machine (CPU) or on one GPU.

On a CPU an engine may offer the memory of its own weights as a receive buffer: the trainer writes there, and the engine
only verifies checksums. Otherwise the trainer rotates three buffers, so that it writes one group while earlier ones are
read; a group must have been read before the third group after it is requested. On a GPU the buffers are shared through
CUDA IPC handles.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from rlframework.errors import RefitError
from rlframework.observers.host import available_memory
from rlframework.weight_sync.buffers import (
    Slot,
    WeightInfo,
    assign_slots,
    buffer_size,
    layout_checksum,
    write_weight,
)
from rlframework.weight_sync.shared_memory import MemoryHandle, SharedMemory, open_memory
from rlframework.workers.machine import identity

BUFFERS = 3
"""Groups of weights in memory at the same time."""

CPU_GROUP, GPU_GROUP = 32 << 20, 1 << 30
"""Default bytes per group. A group on a CPU is small enough to stay in its caches between the two copies."""

OFFERED_GROUP = 128 << 20
"""Default bytes per group written straight into an engine's memory: large, as it needs no buffers and saves calls."""

_USABLE = 0.8
"""Fraction of the free memory that a refit may use."""

GPU_PREFIX = "GPU-"
"""Prefix of the device ids of GPUs."""

_CUDA_DEVICE = 6
"""Index of the device number among the arguments of torch's `rebuild_cuda_tensor`."""


class CudaMemory:
    """`size` bytes on a GPU, 1-D uint8 in `raw`, that other processes can open."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.raw = torch.empty(size, dtype=torch.uint8, device=device)

    @property
    def handle(self) -> CudaHandle:
        """A handle for what has been written so far."""
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize(self.raw.device)
        return CudaHandle(*reduce_tensor(self.raw))


@dataclass(frozen=True)
class CudaHandle:
    """Identifies memory on a GPU, by a call of torch's."""

    rebuild: Callable[..., Tensor]
    arguments: tuple[Any, ...]

    def open(self, device: torch.device) -> Tensor:
        """Return the memory; this process may number the GPU differently."""
        arguments = list(self.arguments)
        arguments[_CUDA_DEVICE] = device.index or 0
        return self.rebuild(*arguments)


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


def device_id(device: torch.device) -> str:
    """Return the id of the GPU or machine of `device`; processes with equal ids can share memory on it."""
    if device.type == "cuda":
        return f"{GPU_PREFIX}{torch.cuda.get_device_properties(device).uuid}"
    return f"{device.type} {_machine()}"


_machine = cache(identity)


def free_bytes(device: torch.device) -> float:
    """Return the bytes that each of `BUFFERS` groups of weights may use on `device`."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    return float("inf") if free is None else free * _USABLE / BUFFERS


def group_bytes(buffer_mb: float | None, device: torch.device) -> float:
    """Return the bytes per group: `generation.refit.buffer_mb` or the default, limited by free memory."""
    default = GPU_GROUP if device.type == "cuda" else CPU_GROUP
    return min(free_bytes(device), default if buffer_mb is None else buffer_mb * 2**20)


class IpcSender:
    """The trainer's side: writes groups of weights to rotating buffers, or to a receiver's buffer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: deque[SharedMemory | CudaMemory] = deque()
        self.receive_buffer: ReceiveBuffer | None = None
        self._open = lru_cache(1)(open_memory)
        self.info: WeightInfo = {}
        self.refit = ""

    def begin(self, info: WeightInfo, receive_buffer: ReceiveBuffer | None = None) -> None:
        """Begin a refit of the weights `info`, which `pack` writes to `receive_buffer` if given.

        Raises `RefitError` if the buffer was laid out for other weights.
        """
        if receive_buffer is not None and receive_buffer.layout != layout_checksum(info):
            raise RefitError(
                "an engine offered a receive buffer for weights other than the trainer's: call its prepare_refit_info "
                "again"
            )
        current = self.receive_buffer
        if receive_buffer is None or current is None or receive_buffer.memory != current.memory:
            self.close()
        self.info, self.receive_buffer, self.refit = info, receive_buffer, uuid4().hex

    def pack(self, names: Iterable[str], weights: Iterator[tuple[str, Tensor]]) -> GroupHandles:
        """Write `weights`, given in the order of `names`, and return their handles."""
        slots = assign_slots(names, self.info)
        offered = self.receive_buffer
        if offered is not None:
            slots = [replace(slot, offset=offered.offsets[slot.name]) for slot in slots]
        else:
            self._next_buffer(buffer_size(slots))
        raw = self.written()
        sums = tuple(write_weight(slot.of(raw), weight, slot.dtype) for slot, weight in match_slots(slots, weights))
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


def match_slots(slots: Iterable[Slot], weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[Slot, Tensor]]:
    """Pair each slot with the next of `weights`; raise `RefitError` if its name or shape differs."""
    for slot in slots:
        name, weight = next(weights, ("nothing", None))
        if weight is None or name != slot.name or tuple(weight.shape) != slot.shape:
            got = "" if weight is None else f" of shape {tuple(weight.shape)}"
            raise RefitError(
                f"the training engine gathered {name}{got} instead of {slot.name} of shape {slot.shape}: its "
                "gather_weights and weight_specs disagree"
            )
        yield slot, weight


class IpcReceiver:
    """The receiver's side. `offered`: the memory it offered as a receive buffer."""

    def __init__(self) -> None:
        self._open = lru_cache(BUFFERS)(open_memory)
        self.offered: SharedMemory | None = None

    def open(self, handles: GroupHandles, device: torch.device) -> Tensor:
        """Return the memory that `handles` refer to, 1-D uint8."""
        if isinstance(handles.memory, CudaHandle):
            return handles.memory.open(device)
        if self.offered is not None and self.offered.handle == handles.memory:
            return self.offered.raw
        return self._open(handles.memory)
