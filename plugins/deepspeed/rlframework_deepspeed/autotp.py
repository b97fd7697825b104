"""Tensor parallelism with DeepSpeed's AutoTP: how each weight is partitioned, and gathering it.

AutoTP replaces a model's layers according to the transformers plan for the model, one of DeepSpeed's, or the user's. It
records on each parameter how it was partitioned; this module reads that record.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlframework.base.errors import NotSupported
from rlframework.engine import ADAPTER, Region, VocabularyShard, adapters, output_head, replacing

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Partition:
    """A rank's partition of a weight of `shape`: ranges (first, end) along `dim`, concatenated.

    `parts`: the ranges of each rank, in order; `rank`: this rank.
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[Ranges, ...]
    rank: int

    @property
    def ranges(self) -> Ranges:
        """This rank's ranges."""
        return self.parts[self.rank]

    @property
    def regions(self) -> Iterator[Region]:
        """The slices of the whole weight that this rank has, and those of its partition."""
        start, everything = 0, [slice(0, size) for size in self.shape]
        before, after = everything[: self.dim], everything[self.dim + 1 :]
        for first, end in self.ranges:
            local = slice(start, start := start + end - first)
            yield (*before, slice(first, end), *after), (*before, local, *after)

    def of(self, whole: Tensor) -> Tensor:
        """This rank's partition of the whole weight; may share its memory."""
        found = [whole.narrow(self.dim, first, end - first) for first, end in self.ranges]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join all ranks' shards into the whole weight; shards may be padded along `dim`."""
        whole = parts[0].new_empty(self.shape)
        for part, ranges in zip(parts, self.parts, strict=True):
            start = 0
            for first, end in ranges:
                whole.narrow(self.dim, first, end - first).copy_(part.narrow(self.dim, start, end - first))
                start += end - first
        return whole

    @property
    def most(self) -> int:
        """The size of the largest shard along `dim`."""
        return max(sum(end - first for first, end in ranges) for ranges in self.parts)


class TensorParallel:
    """AutoTP's partitions of a model's parameters; `group`: the tensor-parallel ranks, None if there is only one."""

    def __init__(self, partitions: dict[int, Partition] | None = None, group: dist.ProcessGroup | None = None) -> None:
        self.group, self._partitions = group, partitions or {}

    @classmethod
    def of(cls, model: nn.Module) -> TensorParallel:
        """Read the partitions of a model that AutoTP has processed; raise `NotSupported` if a layer has no record."""
        group = import_module("deepspeed.utils.groups").get_tensor_model_parallel_group()
        rank = dist.get_rank(group)
        found = {id(one): _recorded_partition(name, one, rank) for name, one in model.named_parameters()}
        return cls({number: partition for number, partition in found.items() if partition is not None}, group)

    def partition(self, tensor: Tensor) -> Partition | None:
        """The partition of the whole weight that `tensor` holds; None if it is replicated."""
        return self._partitions.get(id(tensor))

    def join(self, part: Tensor, partition: Partition | None) -> Tensor:
        """Gather the whole weight from all ranks' shards; `part` is this rank's. Collective if it is partitioned."""
        if partition is None:
            return part
        missing = partition.most - part.shape[partition.dim]
        if missing:
            shape = [missing if dim == partition.dim else size for dim, size in enumerate(part.shape)]
            part = torch.cat((part, part.new_zeros(shape)), partition.dim)
        parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in partition.parts]
        dist.all_gather(parts, part.contiguous(), group=self.group)
        return partition.join(parts)

    def head_rows(self, model: nn.Module) -> VocabularyShard | None:
        """The local rows of the head of `model`, for `HeadPatch`; None: all."""
        partition = self.partition(output_head(model).weight)
        if partition is None or self.group is None:
            return None
        if partition.dim != 0 or len(partition.ranges) != 1:
            raise NotSupported(
                "AutoTP does not split the output head by vocabulary rows, which computing log-probabilities requires; "
                "remove the head from policy.deepspeed.tensor_parallel.partition_config"
            )
        first, end = partition.ranges[0]
        return VocabularyShard(self.group, first, end - first)


def _recorded_partition(name: str, parameter: nn.Parameter, rank: int) -> Partition | None:
    """The partition that AutoTP recorded on `parameter`; `rank`: this rank in the tensor-parallel group."""
    meta: dict[str, Any] | None = getattr(parameter, "ds_autotp_universal_checkpoint_meta", None)
    if not meta or meta["replicated"]:
        return None
    told, dim = meta["conversion"], meta["partition_dim"]
    shape, sizes, widths = meta["logical_shape"], meta["partition_sizes"], meta["sub_param_shard_widths"]
    if told.get("unsupported_reason") or dim is None or not shape or not (sizes or widths):
        raise NotSupported(
            f"AutoTP splits {name} in a way that it cannot merge again, so the weight could not be saved; set "
            "policy.parallelism.tensor to 1, or give a plan in policy.deepspeed.tensor_parallel.partition_config"
        )
    return Partition(tuple(shape), int(dim), _parts(widths or [sizes]), rank)


def _parts(widths: Sequence[Sequence[int]]) -> tuple[Ranges, ...]:
    """The ranges of each rank: one shard of each fused weight; `widths`: for each weight, the shard sizes by rank."""
    start, found = 0, []
    for shares in widths:
        ends = [start + end for end in accumulate(shares)]
        found.append(list(zip([start, *ends[:-1]], ends, strict=True)))
        start = ends[-1]
    return tuple(zip(*found, strict=True))


@contextmanager
def partitioning_adapters() -> Iterator[None]:
    """Make AutoTP partition adapters together with the layers they wrap.

    AutoTP would mistake a wrapped layer for a plain one, because it has a weight, and replace layer and adapter. So it
    processes the unwrapped layers, and the adapters then wrap the results.
    """
    engine_class = import_module("deepspeed.runtime.engine").DeepSpeedEngine
    partition = engine_class._apply_autotp_partitioning

    def partition_both(engine: Any, model: Any, settings: Any) -> Any:
        layers = adapters.layers_of(model)
        for path, layer in layers.items():
            model.set_submodule(path, layer.base_layer)
        try:
            sources = partition(engine, model, settings)
        except (AssertionError, ValueError) as error:  # no plan for the model, or one that AutoTP does not know all of
            reason = str(error).split(". ")[0]
            raise NotSupported(
                f"AutoTP cannot split {type(model).__name__} ({reason}); set policy.parallelism.tensor to 1, or give a "
                "plan in policy.deepspeed.tensor_parallel.partition_config"
            ) from error
        for path, layer in layers.items():
            layer.base_layer = model.get_submodule(path)
            _partition_adapter(path, layer)
            model.set_submodule(path, layer)
        return sources

    with replacing(engine_class, _apply_autotp_partitioning=partition_both):
        yield


def _partition_adapter(path: str, layer: Any) -> None:
    """Partition B like the base of a column-parallel `layer`, or A like that of a row-parallel one.

    The adapter's output then has the layout of the base output. The other matrix is replicated.
    """
    layers, base = import_module("deepspeed.module_inject.layers"), layer.base_layer
    kind = type(base)
    if not isinstance(base, layers.TensorParallel_Layer):
        return
    if kind not in (layers.LinearLayer, layers.LinearAllreduce) or getattr(base, "gather_output", False):
        raise NotSupported(
            f"AutoTP turns {path} into {kind.__name__}, which does not support adapters; remove it from "
            "policy.lora.target_modules, or set policy.parallelism.tensor to 1"
        )
    matrices = layer.lora_B if kind is layers.LinearLayer else layer.lora_A
    whole = matrices[ADAPTER]
    matrices[ADAPTER] = kind(whole, base.mp_group, name=base.name, tp_meta=base.tp_meta)
