"""Offload a rank's state from the GPU to CPU memory between calls, and onload it again. On a CPU nothing moves.

Megatron-core's flat buffers have many views: parameters, buckets, the distributed optimizer's shards. Tensors are
therefore not replaced; their storage is freed and reallocated, so every view stays valid. Gradient buffers are freed
without a copy because every step starts from zero. The optimizer state has no other views and is replaced, so refits
can read its fp32 weights while it is offloaded. Everything moves through pinned memory that is kept
(`rlframework.policy.host_buffers`). Untested on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.engine import HostBuffers
from rlframework_megatron.upstream import DistributedDataParallel

Storage = torch.UntypedStorage


class OffloadableMemory:
    """The storage of tensors and all their views, which can be freed and restored in place."""

    def __init__(self, host: HostBuffers) -> None:
        """`host`: CPU memory for the copies, kept between calls."""
        self._host = host
        self._kept: list[tuple[Storage, Tensor]] = []
        self._dropped: list[tuple[Storage, int]] = []

    @property
    def is_offloaded(self) -> bool:
        """Whether the memory has been freed."""
        return bool(self._kept or self._dropped)

    def offload(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> int:
        """Copy `kept` to CPU memory and free all storages; return the bytes copied. Do not read them until `onload`."""
        if self.is_offloaded:
            return 0
        copied = storages(kept)
        copies = self._host.fetch({("storage", one._cdata): _as_bytes(one) for one in copied})
        self._kept = list(zip(copied, copies.values(), strict=True))
        self._dropped = [(one, one.nbytes()) for one in storages(dropped)]
        for storage, _ in chain(self._kept, self._dropped):
            storage.resize_(0)
        return sum(copy.nbytes for _, copy in self._kept)

    def onload(self) -> int:
        """Reallocate the storages: `kept` with its values, `dropped` with zeros; return the bytes copied."""
        moved = sum(copy.nbytes for _, copy in self._kept)
        for storage, copy in self._kept:
            storage.resize_(copy.nbytes)
            _as_bytes(storage).copy_(copy, non_blocking=True)
        for storage, size in self._dropped:
            storage.resize_(size)
            _as_bytes(storage).zero_()
        self._kept, self._dropped = [], []
        return moved


def storages(tensors: Iterable[Tensor]) -> list[Storage]:
    """The distinct storages of `tensors`."""
    return list({one._cdata: one for one in (tensor.untyped_storage() for tensor in tensors)}.values())


def _as_bytes(storage: Storage) -> Tensor:
    """The bytes of a storage, as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class Offloader:
    """Offloads and onloads model chunks, gradient buffers and megatron-core optimizers."""

    def __init__(
        self, chunks: Sequence[nn.Module], models: Sequence[Any], optimizers: Sequence[Any], device: torch.device
    ) -> None:
        """`models`: `chunks` wrapped in `DistributedDataParallel`, or the chunks. `device`: where they compute."""
        self._chunks, self._models, self._optimizers, self._device = chunks, models, optimizers, device
        self._host = HostBuffers()
        self._memory = OffloadableMemory(self._host)

    def move(self, device: torch.device, *, model: bool, optimizer: bool) -> int:
        """See `Engine.move`. Gradient buffers go with the model (no bytes copied), fp32 weights with the optimizer."""
        if self._device.type == "cpu":
            return 0
        moved = 0
        if optimizer:
            moved += move_state(self._optimizers, device, self._host, of_model=storages(self.weights()))
        if model:
            offload = device.type == "cpu"
            moved += self._memory.offload(self.weights(), self.gradients()) if offload else self._memory.onload()
        return moved

    def weights(self) -> Iterator[Tensor]:
        """Parameters and buffers; parameters are views of a distributed optimizer's flat buffers."""
        for chunk in self._chunks:
            yield from chain(chunk.parameters(), chunk.buffers())

    def gradients(self) -> Iterator[Tensor]:
        """The flat gradient buffers."""
        for model in self._models:
            if isinstance(model, DistributedDataParallel):
                yield from (buffer.grad_data for buffer in (*model.buffers, *model.expert_parallel_buffers))


def main_weights(inner: torch.optim.Optimizer, of_model: Iterable[Storage]) -> list[Tensor]:
    """Tensors that `inner` updates outside the model's memory: the fp32 copies of bfloat16 weights."""
    known = {storage._cdata for storage in of_model}
    updated = (one for group in inner.param_groups for one in group["params"])
    return [one for one in updated if one.untyped_storage()._cdata not in known]


def move_state(
    optimizers: Iterable[Any], device: torch.device, host: HostBuffers, *, of_model: Iterable[Storage]
) -> int:
    """Move moments and fp32 weights outside the storages `of_model` to `device`; return the bytes. Step counts stay.

    `host`: CPU memory for them, kept between calls.
    """
    of_model = list(of_model)
    inner = [one.optimizer for one in optimizers if not one.is_stub_optimizer]
    mains = [main for one in inner for main in main_weights(one, of_model)]
    return host.move_in_place(mains, [state for one in inner for state in one.state.values()], device, scalars=False)
