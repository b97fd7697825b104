"""A whole weight on every rank, from the parts that the ranks of a model have: over tensor, expert and pipeline axes.

Tensor ranks exchange their parts of it; expert ranks, then stages of the pipeline, get it from the one that has it. Who
that is each rank works out by itself (`names.home`). Nothing is rounded or added up, so it arrives bit by bit. Replicas
of a model (data and context parallelism) do this each by itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework_megatron.coordinates import Place
from rlframework_megatron.names import Home, Part, Weight, home, parts_of
from rlframework_megatron.weight_layout import extent


@dataclass(frozen=True)
class Groups:
    """The process groups of the axes that cut a model; None where the axis has one rank. `device`: what they move."""

    device: torch.device
    tensor: dist.ProcessGroup | None = None
    pipeline: dist.ProcessGroup | None = None
    expert: dist.ProcessGroup | None = None
    expert_tensor: dist.ProcessGroup | None = None

    @classmethod
    def current(cls, device: torch.device) -> Groups:
        """Those of megatron-core's `parallel_state`."""
        from rlframework_megatron.upstream import parallel_state

        found = {
            "tensor": parallel_state.get_tensor_model_parallel_group(),
            "pipeline": parallel_state.get_pipeline_model_parallel_group(),
            "expert": parallel_state.get_expert_model_parallel_group(),
            "expert_tensor": parallel_state.get_expert_tensor_parallel_group(),
        }
        return cls(device, **{axis: group for axis, group in found.items() if group.size() > 1})


def place_here(padded_vocabulary: int = 0, layers: tuple[int, ...] = (), *, fused: bool = False) -> Place:
    """The `Place` of this rank in megatron-core's `parallel_state`; for the arguments see there."""
    from rlframework_megatron.upstream import parallel_state

    return Place(
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


def has_it(found: Home, place: Place) -> bool:
    """Whether the rank at `place` is one of those that tell a weight."""
    return place.pipeline_rank == found.stage and found.expert_rank in (None, place.expert_rank)


def gather(local: Tensor | None, weight: Weight, config: Any, place: Place, groups: Groups) -> Tensor:
    """The whole of `weight` on every rank. Collective.

    `local`: the parameter that has this rank's part of it, where `has_it`; None elsewhere. What comes back may share
    its memory.
    """
    told = home(weight, config, place)
    tensor = groups.tensor if weight.expert is None else groups.expert_tensor
    found = None
    if local is not None:
        if tensor is not None and told.split:
            found = _joined(local.to(groups.device), weight, config, place, tensor)
        else:
            found = taken(local.to(groups.device), next(parts_of(weight, config, place)))
    if told.expert_rank is not None and groups.expert is not None and place.pipeline_rank == told.stage:
        found = _handed_out(found, weight.shape, told.expert_rank, groups.expert, groups.device)
    if groups.pipeline is not None:
        found = _handed_out(found, weight.shape, told.stage, groups.pipeline, groups.device)
    assert found is not None
    return found


def taken(local: Tensor, part: Part) -> Tensor:
    """The weight of which all is in the parameter `local`; shares its memory only where that holds nothing else."""
    if len(part.regions) == 1 and extent(part.regions[0][1]) == local.numel():
        return local
    found = local.new_empty(part.shape)
    for whole, here in part.regions:
        found[whole] = local[here]
    return found


def _handed_out(
    found: Tensor | None, shape: tuple[int, ...], rank: int, group: dist.ProcessGroup, device: torch.device
) -> Tensor:
    """The weight of `shape`, from the rank `rank` of `group`."""
    value = torch.empty(shape, device=device) if found is None else found.to(device).contiguous()
    dist.broadcast(value, group=group, group_src=rank)
    return value


def _joined(local: Tensor, weight: Weight, config: Any, place: Place, group: dist.ProcessGroup) -> Tensor:
    """From the parts of the tensor ranks."""
    parts = [next(parts_of(weight, config, place.at_tensor_rank(rank))) for rank in range(group.size())]
    most = max(sum(extent(whole) for whole, _ in part.regions) for part in parts)
    own = parts[group.rank()]
    packed = torch.cat([local[here].reshape(-1) for _, here in own.regions] or [local.new_empty(0)])
    packed = torch.nn.functional.pad(packed, (0, most - packed.numel()))
    received = local.new_empty(most * group.size())
    dist.all_gather(list(received.split(most)), packed, group=group)
    return unpacked(received, parts, most)


def unpacked(received: Tensor, parts: Sequence[Part], most: int) -> Tensor:
    """The whole weight out of the `parts` of all ranks, each packed flat, region by region, in `most` elements."""
    shape = parts[0].shape
    if _in_order(parts, most):
        return received[: math.prod(shape)].view(shape)
    found = received.new_empty(shape)
    for number, part in enumerate(parts):
        place = number * most
        for whole, _ in part.regions:
            size = extent(whole)
            found[whole] = received[place : place + size].view([one.stop - one.start for one in whole])
            place += size
    return found


def _in_order(parts: Sequence[Part], most: int) -> bool:
    """Whether each element lies, among the packed ones, where it lies in the whole."""
    for number, part in enumerate(parts):
        place, width = number * most, math.prod(part.shape[1:])
        for whole, _ in part.regions:
            if whole[0].start * width != place or extent(whole[1:]) != width:
                return False
            place += extent(whole)
    return True
