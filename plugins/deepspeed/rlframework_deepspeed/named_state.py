"""The `Engine` primitives for weights, adapters and moments, by name, whole or as this rank's shards.

Used by refit, saving, portable and sharded checkpoints and the reference swap. Names are those of `save_pretrained`.
AutoTP partitions a weight first (`Partition`); ZeRO then shards this rank's partition into flat ranges (`Slot`).
Loading reads only local slices.
"""

from __future__ import annotations

import math
from abc import ABC
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from rlframework.base.errors import NotSupported
from rlframework.engine import (
    FIRST,
    GATHER,
    SECOND,
    A,
    Engine,
    FileLayout,
    FileWeight,
    Moments,
    ShardedState,
    TensorShard,
    WeightSpec,
    adapters,
    external_name,
    gathered,
    initial_a,
    is_adapter,
    moments_slice,
    pretrained_weights,
    slice_of,
    trace_span,
)
from rlframework_deepspeed import zero_checkpoint
from rlframework_deepspeed.autotp import TensorParallel
from rlframework_deepspeed.config import DeepSpeedConfig
from rlframework_deepspeed.shards import MOMENTS, Read, Shards
from rlframework_deepspeed.slices import Slices, views_with_slices


class ModelState(adapters.ModelAdapters, Engine, ABC):
    """The primitives of `Engine` for weights and moments."""

    backend_config: DeepSpeedConfig
    _shards: Shards
    _tensor: TensorParallel
    _saved_buffers: frozenset[str]
    _layout: FileLayout

    # -- names --------------------------------------------------------------------------------------------------------

    def _named_tensors(self) -> dict[str, Tensor]:
        """The model's saved tensors and adapters, by name; a tied head appears only as the embedding.

        ZeRO may have changed their shapes; `_shape` returns the original one.
        """
        saved = self._saved_buffers
        named = [*self.model.named_parameters(), *((n, b) for n, b in self.model.named_buffers() if n in saved)]
        return {external_name(name): tensor for name, tensor in named}

    def _weights(self) -> dict[str, Tensor]:
        """The saved tensors without adapters."""
        return {name: tensor for name, tensor in self._named_tensors().items() if not is_adapter(name)}

    def _trained(self) -> dict[str, nn.Parameter]:
        """The optimizer's parameters, by the names of `weight_specs`."""
        named = self._named_tensors().items()
        return {name: one for name, one in named if isinstance(one, nn.Parameter) and self._shards.is_trained(one)}

    def _shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of the whole weight."""
        partition = self._tensor.partition(tensor)
        return partition.shape if partition is not None else self._part_shape(tensor)

    def _part_shape(self, tensor: Tensor) -> tuple[int, ...]:
        """The shape of this rank's tensor-parallel partition, before ZeRO shards it."""
        return self._shards.shape(tensor) if isinstance(tensor, nn.Parameter) else tuple(tensor.shape)

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        return self._shards.dtype(tensor) if isinstance(tensor, nn.Parameter) else tensor.dtype

    # -- weights ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def fill(self) -> None:
        """Load the weights of `policy.model_name` and initialise adapters. Not collective."""
        attention = None if self.backend_config.attention == "auto" else self.backend_config.attention
        self.load_weights(pretrained_weights(self._layout, self.model, self.config, attention))
        if self.config.lora is None:
            return
        for name, tensor in self._adapters().items():
            shape, a = self._shape(tensor), name.endswith(A)
            self._write_tensor(tensor, initial_a(name, shape, self.config.lora.seed) if a else torch.zeros(shape))

    def weight_specs(self) -> dict[str, WeightSpec]:
        """See `Engine.weight_specs`."""
        weights = self._weights()
        parts = self._layout.weights.items()
        return {name: WeightSpec(part.shape, self._dtype(weights[part.source])) for name, part in parts}

    def adapter_specs(self) -> dict[str, WeightSpec]:
        """See `Adapters.adapter_specs`."""
        held = self._adapters().items()
        return {name: WeightSpec(self._shape(tensor), self._dtype(tensor)) for name, tensor in held}

    def gather_weights(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """See `Engine.gather_weights`."""
        held = self._named_tensors()

        def gather(name: str) -> Tensor:
            with trace_span(GATHER):
                return self._merged(name, held)

        yield from gathered(names, self._layout.weights, gather)

    def _gather_tensor(self, tensor: Tensor) -> Tensor:
        found = self._shards.whole(tensor) if isinstance(tensor, nn.Parameter) else tensor
        return self._tensor.join(found.detach().to(self._dtype(tensor)), self._tensor.partition(tensor))

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
        """See `Engine.load_weights`."""
        own = self._weights()
        for name, tensor in own.items():
            parts = self._layout.by_source[name]
            if isinstance(tensor, nn.Parameter):
                self._shards.put(tensor, self._reader(tensor, parts, weights))
            else:
                for part in parts:
                    part.of(tensor).copy_(weights[part.name])

    def _reader(self, tensor: nn.Parameter, parts: list[FileWeight], weights: Mapping[str, Tensor]) -> Read:
        """A function that reads a flat range of this rank's partition of `tensor`, stored as `parts` in files."""

        def read(first: int, end: int) -> Tensor:
            row = torch.empty(end - first)
            for part, view, where in self._views(tensor, parts, row, first):
                view.copy_(slice_of(weights, part.name, where))
            return row

        return read

    # -- DeepSpeed's own files ----------------------------------------------------------------------------------------

    def save_native(self, folder: Path, *, optimizer: bool) -> None:
        """See `Engine.save_native`."""
        self._require_no_adapters()
        zero_checkpoint.save(self._shards, folder, optimizer=optimizer)

    @torch.no_grad()
    def load_native(self, folder: Path, *, optimizer: bool) -> None:
        """See `Engine.load_native`."""
        self._require_no_adapters()
        if optimizer:
            zero_checkpoint.load(self._shards, folder, self.context)
            return
        own = self._weights()
        shapes = {name: self._part_shape(tensor) for name, tensor in own.items()}
        for name, read in zero_checkpoint.weights(self._shards, folder, self.context, shapes).items():
            self._put_part(own[name], read())

    def _require_no_adapters(self) -> None:
        if self.config.lora is not None:
            raise NotSupported("adapters are saved in the portable form only; set checkpoints.format to portable")

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

    def gather_moments(self) -> Iterator[tuple[str, Moments]]:
        """See `Engine.gather_moments`."""
        trained = self._trained()
        files = self._layout.by_source
        for name, parameter in trained.items():
            steps, here = self._shards.state(parameter)
            steps = self._everywhere(steps)
            partition = self._tensor.partition(parameter)
            first, second = (
                self._tensor.join(self._shards.all_of(parameter, here.get(kind)), partition) for kind in MOMENTS
            )
            for part in files[name]:
                yield part.name, Moments(steps, part.of(first), part.of(second))

    def _everywhere(self, steps: int) -> int:
        """The step count of a weight, also on ranks without a shard of it. Collective."""
        if self.context.world_size == 1:
            return steps
        most = torch.tensor(steps, device=self.device)
        torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX)
        return int(most)

    @torch.no_grad()
    def load_moments(self, moments: Mapping[str, Moments]) -> None:
        """See `Engine.load_moments`."""
        trained = self._trained()
        files = self._layout.by_source
        self._shards.set_steps({one: _steps(moments, files[name]) for name, one in trained.items()})
        for name, parameter in trained.items():
            state = self._shards.make_state(parameter)
            slot = self._shards.slot(parameter)
            if slot is None:
                continue
            for kind in MOMENTS:
                for part, view, where in self._views(parameter, files[name], state[kind], slot.first):
                    view.copy_(getattr(moments_slice(moments, part.name, where), kind))

    # -- shards -------------------------------------------------------------------------------------------------------

    def sharded_state(self) -> ShardedState:
        """See `Engine.sharded_state`."""
        self._require_no_adapters()
        own = self._weights()
        files = self._layout.by_source
        weights: list[TensorShard] = []
        for name, tensor in own.items():
            if (local := self._row(tensor)) is not None:
                weights += self._tensor_shards(tensor, files[name], *local, "")
        moments: list[TensorShard] = []
        steps: dict[str, int] = {}
        for name, parameter in self._trained().items():
            count, here = self._shards.state(parameter)
            slot = self._shards.slot(parameter)
            if slot is None:
                continue
            steps |= {part.name: count for part in files[name]}
            for start, kind in ((FIRST, MOMENTS[0]), (SECOND, MOMENTS[1])):
                row = here.get(kind, torch.zeros(0)) if here else torch.zeros(slot.count, device=slot.holder.device)
                moments += self._tensor_shards(parameter, files[name], row, slot.first, start)
        return ShardedState(weights, moments, steps)

    def _tensor_shards(
        self, tensor: Tensor, files: list[FileWeight], row: Tensor, first: int, prefix: str
    ) -> Iterator[TensorShard]:
        """Shards of `row`, this rank's partition of `tensor`, from `first` on, named by `files` with `prefix`."""
        for part, view, where in self._views(tensor, files, row, first):
            yield TensorShard(prefix + part.name, view, tuple(one.start for one in where), part.shape)

    def _views(
        self, tensor: Tensor, files: list[FileWeight], row: Tensor, first: int
    ) -> Iterator[tuple[FileWeight, Tensor, Slices]]:
        """Views of `row`, as in `_tensor_shards`, each with the weight that it is part of, and its slices of that."""
        partition, shape = self._tensor.partition(tensor), self._part_shape(tensor)
        for part, own, start in _within(files, row, first):
            for view, where in views_with_slices(own, shape if partition is not None else part.shape, start, partition):
                yield part, view, where


def _steps(moments: Mapping[str, Moments], files: list[FileWeight]) -> int:
    nothing = tuple(slice(0, 0) for _ in files[0].shape)
    return max(moments_slice(moments, part.name, nothing[: len(part.shape)]).steps for part in files)


def _within(files: list[FileWeight], row: Tensor, first: int) -> Iterator[tuple[FileWeight, Tensor, int]]:
    """Yield each weight in `files`, all of one tensor, with its view of `row` and the start of that view in the weight.

    `row` holds the flat elements of the tensor, or of this rank's partition of it, from `first` on.
    """
    for part in files:
        if not part.is_part:
            yield part, row, first
            continue
        start = part.flat_start
        begin, end = max(first, start), min(first + row.numel(), start + math.prod(part.shape))
        if begin < end:
            yield part, row[begin - first : end - first], begin - start
