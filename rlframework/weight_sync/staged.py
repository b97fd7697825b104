"""Weights for an engine whose own loader takes them all at once, in this process or in others."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlframework.weight_sync.buffers import Slot, WeightInfo, assign_slots
from rlframework.weight_sync.ipc import MemoryHandle, SharedMemory, open_memory
from rlframework.weight_sync.receiver import Held, WeightSink


class Source(NamedTuple):
    """The place of all weights of an update: memory of this process (1-D uint8), or shared memory."""

    slots: Sequence[Slot]
    memory: Tensor | MemoryHandle

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight by name, sharing memory; raise `RefitError` if the memory is gone."""
        raw = self.memory if isinstance(self.memory, Tensor) else open_memory(self.memory)
        return ((slot.name, view(slot, raw)) for slot in self.slots)


class StagedWeights(WeightSink):
    """Memory for the weights of an update, which the engine's loader gets all at once.

    A loader may keep references to weights until it has all those of a layer, so buffers that are used in turn would
    give it wrong ones. On a CPU, and for several processes, the memory is shared; on one GPU it is there.
    """

    def __init__(
        self, info: WeightInfo, device: torch.device, load: Callable[[Source], Held], *, several: bool = False
    ) -> None:
        """`load` is called by `finish`; `several`: it is done by other processes."""
        self.info, self._load = info, load
        self._slots = {slot.name: slot for slot in assign_slots(info, info)}
        size = max((slot.offset + slot.size for slot in self._slots.values()), default=1)
        self._shared = SharedMemory(size) if several or device.type == "cpu" else None
        self._raw = self._shared.raw if self._shared else torch.empty(size, dtype=torch.uint8, device=device)
        self._memory = self._shared.handle if self._shared and several else self._raw

    def target(self, name: str) -> Tensor:
        """See `WeightSink.target`."""
        return view(self._slots[name], self._raw)

    def memory(self) -> SharedMemory | None:
        """See `WeightSink.memory`."""
        return self._shared

    def finish(self) -> Held:
        """See `WeightSink.finish`."""
        return self._load(Source(tuple(self._slots.values()), self._memory))


def view(slot: Slot, raw: Tensor) -> Tensor:
    """Return the weight of `slot` in the bytes `raw`, sharing memory."""
    return slot.of(raw).view(slot.dtype).view(slot.shape)
