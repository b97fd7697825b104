"""How a model under ZeRO and AutoTP keeps weights, adapters and moments: the hooks of core's `ModelState`.

AutoTP partitions a weight first (`Partition`); ZeRO then shards this rank's partition into flat ranges (`Slot`).
Loading reads only local slices.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from rlframework.engine import (
    FIRST,
    SECOND,
    A,
    FileWeight,
    ModelState,
    Moments,
    TensorShard,
    WeightSpec,
    external_name,
    fill_weights,
    flat_shards,
    initial_a,
    pretrained_weights,
)
from rlframework_deepspeed import zero_checkpoint
from rlframework_deepspeed.autotp import TensorParallel
from rlframework_deepspeed.config import DeepSpeedConfig
from rlframework_deepspeed.shards import MOMENTS, Read, Shards


class ZeroState(ModelState, ABC):
    """The primitives of `Engine` for weights and moments."""

    backend_config: DeepSpeedConfig
    _shards: Shards
    _tensor: TensorParallel
    _saved_buffers: frozenset[str]

    # -- names --------------------------------------------------------------------------------------------------------

    def _named_tensors(self) -> dict[str, Tensor]:
        """The model's saved tensors and adapters, by name; a tied head appears only as the embedding.

        ZeRO may have changed their shapes; `_spec` returns the original one.
        """
        saved = self._saved_buffers
        named = [*self.model.named_parameters(), *((n, b) for n, b in self.model.named_buffers() if n in saved)]
        return {external_name(name): tensor for name, tensor in named}

    def _trained(self) -> dict[str, nn.Parameter]:
        named = self._named_tensors().items()
        return {name: one for name, one in named if isinstance(one, nn.Parameter) and self._shards.is_trained(one)}

    def _spec(self, tensor: Tensor) -> WeightSpec:
        partition = self._tensor.partition(tensor)
        shape = partition.shape if partition is not None else self._part_shape(tensor)
        return WeightSpec(shape, self._shards.dtype(tensor) if isinstance(tensor, nn.Parameter) else tensor.dtype)

    def _part_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of this rank's tensor-parallel partition, before ZeRO shards it."""
        return self._shards.shape(tensor) if isinstance(tensor, nn.Parameter) else tuple(tensor.shape)

    # -- weights ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self) -> None:
        """Load the weights of `policy.model_name` and initialise adapters. Not collective."""
        attention = None if self.backend_config.attention == "auto" else self.backend_config.attention
        self.load_weights(pretrained_weights(self._layout, self.model, self.config, attention))
        if self.config.lora is None:
            return
        for name, tensor in self._adapters().items():
            shape, a = self._spec(tensor).shape, name.endswith(A)
            self._write_tensor(tensor, initial_a(name, shape, self.config.lora.seed) if a else torch.zeros(shape))

    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        found = self._shards.whole(tensor) if isinstance(tensor, nn.Parameter) else tensor
        return self._tensor.join(found.detach().to(self._spec(tensor).dtype), self._tensor.partition(tensor))

    @torch.no_grad()
    def _write_tensor(self, tensor: Tensor, value: Tensor) -> None:
        partition = self._tensor.partition(tensor)
        self._put_part(tensor, value if partition is None else partition.of(value))

    def _put_part(self, tensor: Tensor, own: Tensor) -> None:
        """Set `tensor` from `own`, this rank's tensor-parallel partition."""
        if not isinstance(tensor, nn.Parameter):
            tensor.copy_(own)
            return
        row = own.reshape(-1)
        self._shards.put(tensor, lambda first, end: row[first:end])

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """See `Engine.load_weights`; sets the forward's copies of parameters too."""
        for name, tensor in self._weights().items():
            parts = self._layout.by_source[name]
            if isinstance(tensor, nn.Parameter):
                self._shards.put(tensor, self._reader(tensor, parts, weights))
            else:
                fill_weights(self._weight_shards(tensor, parts), weights)

    def _reader(self, tensor: nn.Parameter, parts: Sequence[FileWeight], weights: Mapping[str, Tensor]) -> Read:
        """A function that reads a flat range of this rank's partition of `tensor`, stored as `parts` in files."""

        def read(first: int, end: int) -> Tensor:
            row = torch.empty(end - first)
            fill_weights(self._shards_of_row(tensor, parts, row, first), weights)
            return row

        return read

    # -- DeepSpeed's own files ----------------------------------------------------------------------------------------

    def save_native(self, folder: Path, *, optimizer: bool) -> None:
        """See `Engine.save_native`."""
        zero_checkpoint.save(self._shards, folder, optimizer=optimizer)

    @torch.no_grad()
    def load_native(self, folder: Path, *, optimizer: bool) -> None:
        """See `Engine.load_native`."""
        if optimizer:
            zero_checkpoint.load(self._shards, folder, self.context)
            return
        own = self._weights()
        shapes = {name: self._part_shape(tensor) for name, tensor in own.items()}
        for name, read in zero_checkpoint.weights(self._shards, folder, self.context, shapes).items():
            self._put_part(own[name], read())

    # -- the reference ------------------------------------------------------------------------------------------------

    def snapshot(self) -> dict[str, Tensor]:
        """See `Engine.snapshot`."""
        return {name: part.to("cpu", copy=True) for name, part in self._local().items()}

    @torch.no_grad()
    def restore(self, snapshot: dict[str, Tensor]) -> None:
        """See `Engine.restore`."""
        for name, part in self._local().items():
            part.copy_(snapshot[name])
        self._shards.publish()

    def _local(self) -> dict[str, Tensor]:
        """This rank's flat shard of each tensor; empty shards are omitted."""
        named = self._named_tensors().items()
        return {name: row[0] for name, tensor in named if (row := self._row(tensor)) is not None}

    def _row(self, tensor: Tensor) -> tuple[Tensor, int] | None:
        """This rank's flat shard of `tensor`, and where it starts in this rank's partition; None if it has none."""
        if not isinstance(tensor, nn.Parameter):
            return tensor.detach().view(-1), 0
        slot = self._shards.slot(tensor)
        return None if slot is None else (slot.main, slot.first)

    # -- moments ------------------------------------------------------------------------------------------------------

    def _whole_moments(self, parameter: nn.Parameter) -> Moments:
        steps, here = self._shards.state(parameter)
        steps, partition = self._everywhere(steps), self._tensor.partition(parameter)
        whole = (self._tensor.join(self._shards.all_of(parameter, here.get(kind)), partition) for kind in MOMENTS)
        return Moments(steps, *whole)

    def _everywhere(self, steps: int) -> int:
        """The step count of a weight, also on ranks without a shard of it. Collective."""
        if self.context.world_size == 1:
            return steps
        most = torch.tensor(steps, device=self.device)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        return int(most)

    def _steps(self, parameter: nn.Parameter) -> int | None:
        return None if self._shards.slot(parameter) is None else self._shards.state(parameter)[0]

    @torch.no_grad()
    def _create_moments(self, steps: Mapping[nn.Parameter, int]) -> None:
        self._shards.set_steps(steps)
        for parameter in steps:
            self._shards.make_state(parameter)

    # -- shards -------------------------------------------------------------------------------------------------------

    def _weight_shards(self, tensor: Tensor, parts: Sequence[FileWeight]) -> Iterator[TensorShard]:
        if (local := self._row(tensor)) is not None:
            yield from self._shards_of_row(tensor, parts, *local)

    def _moment_shards(self, parameter: nn.Parameter, parts: Sequence[FileWeight]) -> Iterator[TensorShard]:
        if (slot := self._shards.slot(parameter)) is None:
            return
        _, here = self._shards.state(parameter)
        for prefix, kind in zip((FIRST, SECOND), MOMENTS, strict=True):
            row = here[kind] if here else torch.zeros(slot.count, device=slot.holder.device)
            yield from self._shards_of_row(parameter, parts, row, slot.first, prefix)

    def _shards_of_row(
        self, tensor: Tensor, parts: Sequence[FileWeight], row: Tensor, first: int, prefix: str = ""
    ) -> Iterator[TensorShard]:
        """Shards of `row`, this rank's partition of `tensor`, from `first` on, named by `parts` with `prefix`."""
        partition = self._tensor.partition(tensor)
        regions = None if partition is None else tuple(partition.regions)
        for part, own, start in _within(parts, row, first):
            yield from flat_shards(prefix + part.name, part.shape, own, start, self._part_shape(tensor), regions)


def _within(parts: Sequence[FileWeight], row: Tensor, first: int) -> Iterator[tuple[FileWeight, Tensor, int]]:
    """Yield each weight in `parts`, all of one tensor, with its view of `row` and the start of that view in the weight.

    `row` holds the flat elements of the tensor, or of this rank's partition of it, from `first` on.
    """
    for part in parts:
        if not part.is_part:
            yield part, row, first
            continue
        start = part.flat_start
        begin, end = max(first, start), min(first + row.numel(), start + math.prod(part.shape))
        if begin < end:
            yield part, row[begin - first : end - first], begin - start
