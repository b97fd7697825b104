"""IPC: groups of weights in memory that a process on the same machine (CPU) or the same GPU reads where it is.

On a CPU an engine may offer memory that its weights lie in: the trainer writes them there, and the engine has but to
read what came. Else there are three buffers, used in turn, so that one group is written while those before it are read.
Who asks for groups must have had a group read before it asks for the third one after it. On a GPU the buffers are
handed over by CUDA's own handles.
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
from rlframework.weight_sync.buffers import Info, Slot, layout_checksum, place, put, room_for
from rlframework.weight_sync.memory_budget import BUFFERS
from rlframework.weight_sync.shared_memory import MemoryHandle, OpenedMemory, SharedMemory
from rlframework.workers.machine import identity

_CUDA_DEVICE = 6
"""Which argument of torch's `rebuild_cuda_tensor` is the number of the device."""


@dataclass(frozen=True)
class GroupHandles:
    """A group of weights in shared memory. `refit` is the same for all groups of one refit, and for no others."""

    refit: str
    slots: tuple[Slot, ...]
    checksums: tuple[int, ...]
    memory: MemoryHandle | None = None
    cuda: tuple[Any, ...] | None = None


@dataclass(frozen=True)
class Room:
    """Memory of a receiver, and where in it each weight goes. `layout` is the checksum of what it expects there."""

    memory: MemoryHandle
    layout: int
    offsets: Mapping[str, int]


@cache
def _machine() -> str:
    return identity()


def device_id(device: torch.device) -> str:
    """What processes that can share memory on `device` have in common, and no others."""
    if device.type == "cuda":
        return f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return f"{device.type} {_machine()}"


class Outbox:
    """The trainer's side: what it shares, until it shares the third group after it, or where a receiver has room."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[SharedMemory | Tensor | None] = [None] * BUFFERS
        self._turn = 0
        self._room: Room | None = None
        self._opened = OpenedMemory(1)
        self.info: Info = {}
        self.refit = ""

    def begin(self, info: Info, room: Room | None = None) -> None:
        """A new refit of the weights `info`, which are written to `room` where there is one."""
        if room is not None and room.layout != layout_checksum(info):
            raise RefitError("an engine made room for other weights than there are: call its prepare_refit_info again")
        if room is None or self._room is None or room.memory != self._room.memory:
            self.close()
        self.info, self._room, self.refit = info, room, uuid4().hex

    def pack(self, names: Iterable[str], weights: Iterator[tuple[str, Tensor]]) -> GroupHandles:
        """Write `weights`, which come in the order of `names`, and say where they are."""
        slots = place(names, self.info)
        if self._room is not None:
            return self._pack_there(self._room, slots, weights)
        self._turn = (self._turn + 1) % BUFFERS
        buffer = self._buffer(room_for(slots))
        raw = buffer.raw if isinstance(buffer, SharedMemory) else buffer
        sums = tuple(put(slot.of(raw), weight, slot.dtype) for slot, weight in in_order(slots, weights))
        if isinstance(buffer, SharedMemory):
            return GroupHandles(self.refit, tuple(slots), sums, memory=buffer.handle)
        from torch.multiprocessing.reductions import reduce_tensor

        torch.cuda.synchronize(self._device)
        return GroupHandles(self.refit, tuple(slots), sums, cuda=reduce_tensor(buffer))

    def _pack_there(self, room: Room, slots: Iterable[Slot], weights: Iterator[tuple[str, Tensor]]) -> GroupHandles:
        there = tuple(replace(slot, offset=room.offsets[slot.name]) for slot in slots)
        raw = self._opened.open(room.memory)
        sums = tuple(put(slot.of(raw), weight, slot.dtype) for slot, weight in in_order(there, weights))
        return GroupHandles(self.refit, there, sums, memory=room.memory)

    def written(self, handles: GroupHandles) -> Tensor:
        """The bytes that the last group was written to, uint8 of one dimension."""
        if self._room is not None and handles.memory == self._room.memory:
            return self._opened.open(self._room.memory)
        buffer = self._buffers[self._turn]
        assert buffer is not None
        return buffer.raw if isinstance(buffer, SharedMemory) else buffer

    def _buffer(self, size: int) -> SharedMemory | Tensor:
        """The buffer whose turn it is, made anew where it is too small."""
        buffer = self._buffers[self._turn]
        there = 0 if buffer is None else buffer.raw.numel() if isinstance(buffer, SharedMemory) else buffer.numel()
        if buffer is None or there < size:
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
        """Let go of the buffers, and of a receiver's memory."""
        for turn in range(BUFFERS):
            self._close(turn)
        self._opened.close()


def in_order(slots: Iterable[Slot], weights: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[Slot, Tensor]]:
    """The next of `weights`, each with its slot. A `RefitError` where the engine gives others."""
    for slot in slots:
        name, weight = next(weights, ("nothing", None))
        if weight is None or name != slot.name or tuple(weight.shape) != slot.shape:
            got = "" if weight is None else f" of shape {tuple(weight.shape)}"
            raise RefitError(
                f"the training engine gave {name}{got} where {slot.name} of shape {slot.shape} was asked for: its "
                "gather_weights and weight_specs do not say the same"
            )
        yield slot, weight


class Inbox:
    """The receiver's side. `own`: the memory that it offered."""

    def __init__(self) -> None:
        self._memory = OpenedMemory(BUFFERS)
        self.own: SharedMemory | None = None

    def open(self, handles: GroupHandles, device: torch.device) -> Tensor:
        """The bytes of a group, uint8 of one dimension."""
        if handles.memory is not None:
            if self.own is not None and self.own.handle == handles.memory:
                return self.own.raw
            return self._memory.open(handles.memory)
        assert handles.cuda is not None
        rebuild, given = handles.cuda
        arguments = list(given)
        arguments[_CUDA_DEVICE] = device.index or 0  # the same GPU may have another number here
        raw: Tensor = rebuild(*arguments)
        return raw

    def close(self) -> None:
        """Let go of what is open."""
        self._memory.close()
