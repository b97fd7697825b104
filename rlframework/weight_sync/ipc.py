"""IPC: groups of weights in memory shared by processes on one machine (CPU) or on one GPU.

On a CPU an engine may offer the memory of its own weights as a receive buffer: the trainer writes there, and the engine
only verifies checksums. Otherwise the trainer rotates three buffers, so that it writes one group while earlier ones are
read; a group must have been read before the third group after it is requested. On a GPU the buffers are shared through
CUDA IPC handles.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any
from uuid import uuid4

import torch
from torch import Tensor

from rlframework.errors import RefitError
from rlframework.weight_sync.buffers import (
    Slot,
    WeightInfo,
    assign_slots,
    buffer_size,
    layout_checksum,
    write_weight,
)
from rlframework.weight_sync.memory_budget import BUFFERS
from rlframework.weight_sync.shared_memory import MemoryHandle, OpenedMemory, SharedMemory
from rlframework.workers.machine import identity

GPU = "GPU-"
"""Prefix of the device ids of GPUs."""

_CUDA_DEVICE = 6
"""Index of the device number among the arguments of torch's `rebuild_cuda_tensor`."""


@dataclass(frozen=True)
class GroupHandles:
    """A group of weights in shared memory. `refit` identifies the refit that the group belongs to."""

    refit: str
    slots: tuple[Slot, ...]
    checksums: tuple[int, ...]
    memory: MemoryHandle | None = None
    cuda: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class ReceiveBuffer:
    """A receiver's memory and the offset of each weight in it. `layout`: checksum of the layout it expects."""

    memory: MemoryHandle
    layout: int
    offsets: Mapping[str, int]


@cache
def _machine() -> str:
    return identity()


def device_id(device: torch.device) -> str:
    """Return the id of the GPU or machine of `device`; processes with equal ids can share memory on it."""
    if device.type == "cuda":
        return f"{GPU}{torch.cuda.get_device_properties(device).uuid}"
    return f"{device.type} {_machine()}"


class IpcSender:
    """The trainer's side: writes groups of weights to rotating buffers, or to a receiver's buffer."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[SharedMemory | Tensor | None] = [None] * BUFFERS
        self._turn = 0
        self._receive_buffer: ReceiveBuffer | None = None
        self._opened = OpenedMemory(1)
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
        current = self._receive_buffer
        if receive_buffer is None or current is None or receive_buffer.memory != current.memory:
            self.close()
        self.info, self._receive_buffer, self.refit = info, receive_buffer, uuid4().hex

    def pack(self, names: Iterable[str], weights: Iterator[tuple[str, Tensor]]) -> GroupHandles:
        """Write `weights`, given in the order of `names`, and return their handles."""
        slots = assign_slots(names, self.info)
        if self._receive_buffer is not None:
            return self._pack_into(self._receive_buffer, slots, weights)
        self._turn = (self._turn + 1) % BUFFERS
        buffer = self._next_buffer(buffer_size(slots))
        raw = buffer.raw if isinstance(buffer, SharedMemory) else buffer
        sums = tuple(write_weight(slot.of(raw), weight, slot.dtype) for slot, weight in match_slots(slots, weights))
        if isinstance(buffer, SharedMemory):
            return GroupHandles(self.refit, tuple(slots), sums, memory=buffer.handle)
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize(self._device)
        return GroupHandles(self.refit, tuple(slots), sums, cuda=reduce_tensor(buffer))

    def _pack_into(
        self, buffer: ReceiveBuffer, slots: Iterable[Slot], weights: Iterator[tuple[str, Tensor]]
    ) -> GroupHandles:
        targets = tuple(replace(slot, offset=buffer.offsets[slot.name]) for slot in slots)
        raw = self._opened.open(buffer.memory)
        sums = tuple(write_weight(slot.of(raw), weight, slot.dtype) for slot, weight in match_slots(targets, weights))
        return GroupHandles(self.refit, targets, sums, memory=buffer.memory)

    def written(self, handles: GroupHandles) -> Tensor:
        """Return the memory that the last group was written to, 1-D uint8."""
        if self._receive_buffer is not None and handles.memory == self._receive_buffer.memory:
            return self._opened.open(self._receive_buffer.memory)
        buffer = self._buffers[self._turn]
        assert buffer is not None
        return buffer.raw if isinstance(buffer, SharedMemory) else buffer

    def _next_buffer(self, size: int) -> SharedMemory | Tensor:
        """Return the current buffer of the rotation, reallocated if it is too small."""
        buffer = self._buffers[self._turn]
        capacity = 0 if buffer is None else buffer.raw.numel() if isinstance(buffer, SharedMemory) else buffer.numel()
        if buffer is None or capacity < size:
            self._close(self._turn)
            on_gpu = self._device.type == "cuda"
            made = torch.empty(size, dtype=torch.uint8, device=self._device) if on_gpu else SharedMemory(size)
            self._buffers[self._turn] = buffer = made
        return buffer

    def _close(self, turn: int) -> None:
        buffer, self._buffers[turn] = self._buffers[turn], None
        if isinstance(buffer, SharedMemory):
            buffer.close()

    def close(self) -> None:
        """Release the buffers and a receiver's memory."""
        for turn in range(BUFFERS):
            self._close(turn)
        self._opened.close()


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
        self._memory = OpenedMemory(BUFFERS)
        self.offered: SharedMemory | None = None

    def open(self, handles: GroupHandles, device: torch.device) -> Tensor:
        """Return the memory that `handles` refer to, 1-D uint8."""
        if handles.memory is not None:
            if self.offered is not None and self.offered.handle == handles.memory:
                return self.offered.raw
            return self._memory.open(handles.memory)
        assert handles.cuda is not None
        rebuild, given = handles.cuda
        arguments = list(given)
        arguments[_CUDA_DEVICE] = device.index or 0  # this process may number the same GPU differently
        raw: Tensor = rebuild(*arguments)
        return raw

    def close(self) -> None:
        """Release all opened memory."""
        self._memory.close()
