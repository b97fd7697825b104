"""Moving what a rank holds between a GPU and CPU memory, between calls. On a CPU nothing moves.

Megatron-core's flat buffers have many views: parameters, buckets, the distributed optimizer's shards. So weights are
not replaced: the memory under them is given up and comes back, and every view stays what it is. Buffers of gradients
are given up without a copy, since each step begins with none. The optimizer's state, of which nothing else is a view,
is replaced: refits read its fp32 weights while it is away. None of it has been tried on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from rlframework_megatron.upstream import DistributedDataParallel

Storage = torch.UntypedStorage


class Memory:
    """The memory of tensors and of all that shares it: given up, and brought back where it was."""

    def __init__(self) -> None:
        self._kept: list[tuple[Storage, Tensor]] = []
        self._dropped: list[tuple[Storage, int]] = []

    @property
    def is_away(self) -> bool:
        """Whether it has been given up."""
        return bool(self._kept or self._dropped)

    def give_up(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> int:
        """Free it, once what `kept` holds is in CPU memory; the bytes of that. Until `bring_back` nobody reads them."""
        if self.is_away:
            return 0
        self._kept = [(one, _copied(one)) for one in storages(kept)]
        self._dropped = [(one, one.nbytes()) for one in storages(dropped)]
        for storage, _ in chain(self._kept, self._dropped):
            storage.resize_(0)
        return sum(copy.nbytes for _, copy in self._kept)

    def bring_back(self) -> int:
        """Take the memory again: `kept` as it was, `dropped` as zeros; the bytes that moved."""
        moved = sum(copy.nbytes for _, copy in self._kept)
        for storage, copy in self._kept:
            storage.resize_(copy.nbytes)
            _seen(storage).copy_(copy)
        for storage, size in self._dropped:
            storage.resize_(size)
            _seen(storage).zero_()
        self._kept, self._dropped = [], []
        return moved


def storages(tensors: Iterable[Tensor]) -> list[Storage]:
    """What lies under `tensors`, each once."""
    return list({one._cdata: one for one in (tensor.untyped_storage() for tensor in tensors)}.values())


def _seen(storage: Storage) -> Tensor:
    """Its bytes, as a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _copied(storage: Storage) -> Tensor:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return copy.copy_(_seen(storage))


class Moves:
    """The moves of `chunks`, of `models`, which reduce their gradients, and of megatron-core's `optimizers` of them."""

    def __init__(
        self, chunks: Sequence[nn.Module], models: Sequence[Any], optimizers: Sequence[Any], device: torch.device
    ) -> None:
        """`models`: `DistributedDataParallel`, or the chunks themselves. `device`: where they compute."""
        self._chunks, self._models, self._optimizers, self._device = chunks, models, optimizers, device
        self._memory = Memory()

    def move(self, device: torch.device, *, model: bool, optimizer: bool) -> int:
        """See `Engine.move`. Gradients go with the model, and move no bytes; fp32 weights with the optimizer."""
        if self._device.type == "cpu":
            return 0
        moved = 0
        if optimizer:
            moved += move_state(self._optimizers, device, of_model=storages(self.weights()))
        if model:
            away = device.type == "cpu"
            moved += self._memory.give_up(self.weights(), self.gradients()) if away else self._memory.bring_back()
        return moved

    def weights(self) -> Iterator[Tensor]:
        """Parameters and buffers; a distributed optimizer's flat buffers lie under the parameters."""
        for chunk in self._chunks:
            yield from chain(chunk.parameters(), chunk.buffers())

    def gradients(self) -> Iterator[Tensor]:
        """The flat buffers that gradients are added up in."""
        for model in self._models:
            if isinstance(model, DistributedDataParallel):
                yield from (buffer.grad_data for buffer in (*model.buffers, *model.expert_parallel_buffers))


def own_weights(inner: torch.optim.Optimizer, of_model: Iterable[Storage]) -> list[Tensor]:
    """What `inner` updates that is not memory of the model: fp32 weights behind bfloat16 ones."""
    known = {storage._cdata for storage in of_model}
    updated = (one for group in inner.param_groups for one in group["params"])
    return [one for one in updated if one.untyped_storage()._cdata not in known]


def move_state(optimizers: Iterable[Any], device: torch.device, *, of_model: Iterable[Storage]) -> int:
    """Moments, and fp32 weights that are not memory `of_model`, to `device`; bytes moved. Counts of steps stay."""
    moved, of_model = 0, list(of_model)
    for inner in (one.optimizer for one in optimizers if not one.is_stub_optimizer):
        for main in own_weights(inner, of_model):
            moved += _bytes_elsewhere(main, device)
            main.data = main.data.to(device)
        for state in inner.state.values():
            moments = {name: value for name, value in state.items() if isinstance(value, Tensor) and value.ndim}
            moved += sum(_bytes_elsewhere(value, device) for value in moments.values())
            state.update({name: value.to(device) for name, value in moments.items()})
    return moved


def _bytes_elsewhere(tensor: Tensor, device: torch.device) -> int:
    return 0 if tensor.device.type == device.type else tensor.nbytes
