"""Parameters in pieces: what of a whole tensor is here, putting a whole tensor into its piece, and getting it back.

A `DTensor` of FSDP over tensor parallelism is cut by tensor parallelism first and by FSDP inside that, both along
dimension 0 if need be and in pieces of unequal size, for which torch's `distribute_tensor` (2.13) gives wrong pieces.
So where a piece lies is worked out here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Shard, _StridedShard


def local(tensor: Tensor) -> Tensor:
    """This rank's part of `tensor`, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(tensor: Tensor) -> tuple[slice, ...]:
    """Where this rank's part of `tensor` lies in the whole, by dimension. No collective."""
    starts, stops = [0] * tensor.ndim, list(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tuple(map(slice, starts, stops))
    mesh = tensor.device_mesh
    # the last dimension of the mesh, tensor parallelism, cuts first
    for number in reversed(range(mesh.ndim)):
        placement = tensor.placements[number]
        if not isinstance(placement, (Shard, _StridedShard)):
            continue
        dim, ranks, rank = placement.dim % tensor.ndim, mesh.size(number), mesh.get_local_rank(number)
        size = -(-(stops[dim] - starts[dim]) // ranks)  # as torch.chunk cuts
        starts[dim], stops[dim] = (min(starts[dim] + size * n, stops[dim]) for n in (rank, rank + 1))
    return tuple(map(slice, starts, stops))


@torch.no_grad()
def put(tensor: Tensor, whole_value: Tensor) -> None:
    """Write this rank's part of `whole_value`, of any dtype and device, into `tensor`, in place. No collective."""
    local(tensor).copy_(whole_value[own_part(tensor)])


def whole(tensor: Tensor) -> Tensor:
    """All of `tensor`; a collective where it is cut."""
    if not isinstance(tensor, DTensor):
        return tensor
    cut: Any = tensor
    if cut.device.type != cut.device_mesh.device_type:  # it lies in CPU memory, and NCCL takes none of that
        cut = cut.to(cut.device_mesh.device_type)
    if cut.device_mesh.ndim > 1:  # the pieces of FSDP first: they lie inside those of tensor parallelism
        first = [*[Replicate()] * (cut.device_mesh.ndim - 1), cut.placements[-1]]
        cut = cut.redistribute(placements=first)
    found: Tensor = cut.full_tensor()
    return found
