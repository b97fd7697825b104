"""Gather a whole weight on every rank from its shards along the tensor, expert and pipeline axes.

Tensor ranks all-gather their shards; expert ranks, then pipeline stages, receive the weight by broadcast from its
owner, which every rank computes locally (`names.owner_of`). Nothing is rounded or summed, so the copy is bit-exact.
Each replica of a model (data and context parallelism) gathers independently.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework_megatron.coordinates import Coordinates
from rlframework_megatron.names import Weight, WeightShard, owner_of, shards_of
from rlframework_megatron.weight_layout import extent


@dataclass(frozen=True)
class Groups:
    """Process groups of the axes that shard a model; None for an axis of one rank. `device`: where they communicate."""

    device: torch.device
    tensor: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None
    expert_tensor: dist.ProcessGroup | None = None

    @classmethod
    def current(cls, device: torch.device) -> Groups:
        """The groups of megatron-core's `parallel_state`."""
        from rlframework_megatron.upstream import parallel_state

        found = {
            "tensor": parallel_state.get_tensor_model_parallel_group(),
            "pipeline": parallel_state.get_pipeline_model_parallel_group(),
            "expert": parallel_state.get_expert_model_parallel_group(),
            "expert_tensor": parallel_state.get_expert_tensor_parallel_group(),
        }
        return cls(device, **{axis: group for axis, group in found.items() if group.size() > 1})


def local_coordinates(padded_vocabulary: int = 0, layers: tuple[int, ...] = (), *, fused: bool = False) -> Coordinates:
    """This rank's `Coordinates` from megatron-core's `parallel_state`; the arguments are described there."""
    from rlframework_megatron.upstream import parallel_state

    return Coordinates(
        tensor_rank=parallel_state.get_tensor_model_parallel_rank(),
        tensor_size=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline_rank=parallel_state.get_pipeline_model_parallel_rank(),
        pipeline_size=parallel_state.get_pipeline_model_parallel_world_size(),
        chunks=parallel_state.get_virtual_pipeline_model_parallel_world_size() or 1,
        expert_rank=parallel_state.get_expert_model_parallel_rank(),
        expert_size=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor_rank=parallel_state.get_expert_tensor_parallel_rank(),
        expert_tensor_size=parallel_state.get_expert_tensor_parallel_world_size(),
        padded_vocabulary=padded_vocabulary,
        layers=layers,
        fused=fused,
    )


def gather(local: Tensor | None, weight: Weight, config: Any, coordinates: Coordinates, groups: Groups) -> Tensor:
    """Return the whole `weight` on every rank. Collective.

    `local`: the parameter that contains this rank's shard if it is an owner, else None. The result may share its
    memory.
    """
    owner = owner_of(weight, config, coordinates)
    tensor = groups.tensor if weight.expert is None else groups.expert_tensor
    found = None
    if local is not None:
        if tensor is not None and owner.split:
            found = _all_gather(local.to(groups.device), weight, config, coordinates, tensor)
        else:
            found = extract_weight(local.to(groups.device), next(shards_of(weight, config, coordinates)))
    if owner.expert_rank is not None and groups.expert is not None and coordinates.pipeline_rank == owner.stage:
        found = _broadcast(found, weight.shape, owner.expert_rank, groups.expert, groups.device)
    if groups.pipeline is not None:
        found = _broadcast(found, weight.shape, owner.stage, groups.pipeline, groups.device)
    assert found is not None
    return found


def extract_weight(local: Tensor, shard: WeightShard) -> Tensor:
    """Extract a weight stored entirely in the parameter `local`; shares memory only if nothing else is in it."""
    if len(shard.regions) == 1 and extent(shard.regions[0][1]) == local.numel():
        return local
    found = local.new_empty(shard.shape)
    for whole, local_slices in shard.regions:
        found[whole] = local[local_slices]
    return found


def _broadcast(
    found: Tensor | None, shape: tuple[int, ...], rank: int, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """Broadcast the weight of `shape` from rank `rank` of `group`."""
    value = torch.empty(shape, device=device) if found is None else found.to(device).contiguous()
    dist.broadcast(value, group=group, group_src=rank)
    return value


def _all_gather(
    local: Tensor, weight: Weight, config: Any, coordinates: Coordinates, group: dist.ProcessGroup
) -> Tensor:
    """All-gather the weight from the shards of the tensor ranks."""
    shards = [next(shards_of(weight, config, coordinates.at_tensor_rank(rank))) for rank in range(group.size())]
    padded_size = max(sum(extent(whole) for whole, _ in shard.regions) for shard in shards)
    own = shards[group.rank()]
    packed = torch.cat([local[local_slices].reshape(-1) for _, local_slices in own.regions] or [local.new_empty(0)])
    packed = torch.nn.functional.pad(packed, (0, padded_size - packed.numel()))
    received = local.new_empty(padded_size * group.size())
    dist.all_gather(list(received.split(padded_size)), packed, group=group)
    return unpack(received, shards, padded_size)


def unpack(received: Tensor, shards: Sequence[WeightShard], padded_size: int) -> Tensor:
    """Unpack the whole weight from all ranks' `shards`, each flattened region by region and padded to `padded_size`."""
    shape = shards[0].shape
    if _in_order(shards, padded_size):
        return received[: math.prod(shape)].view(shape)
    found = received.new_empty(shape)
    for number, shard in enumerate(shards):
        position = number * padded_size
        for whole, _ in shard.regions:
            size = extent(whole)
            found[whole] = received[position : position + size].view([one.stop - one.start for one in whole])
            position += size
    return found


def _in_order(shards: Sequence[WeightShard], padded_size: int) -> bool:
    """Whether every packed element already has its position in the whole weight."""
    for number, shard in enumerate(shards):
        position, width = number * padded_size, math.prod(shard.shape[1:])
        for whole, _ in shard.regions:
            if whole[0].start * width != position or extent(whole[1:]) != width:
                return False
            position += extent(whole)
    return True
