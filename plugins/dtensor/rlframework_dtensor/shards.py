"""Sharded parameters: the local shard, its place in the whole tensor, copying into it, and gathering it.

FSDP on top of tensor parallelism shards a `DTensor` by tensor parallelism first and by FSDP within that, possibly both
along dimension 0 and unevenly, for which torch's `distribute_tensor` (2.13) returns wrong shards. This module
therefore computes offsets itself. The functions that take a `FileWeight` map these shards to the weights' names in
files (`rlframework.models.file_weights`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Shard, _StridedShard

from rlframework.engine import FileWeight, Slices, TensorShard


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of `tensor`, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def with_local(tensor: Tensor, local: Tensor) -> Tensor:
    """Return `tensor` with the shard `local`, which may be on another device; detached."""
    if not isinstance(tensor, DTensor):
        return local
    make: Any = DTensor  # `from_local` would move the shard to the mesh's device
    sharded: Tensor = make(local, tensor._spec, requires_grad=False)
    return sharded


def local_slices(tensor: Tensor) -> Slices:
    """Return the place of this rank's shard within the whole of `tensor`, one slice per dimension. No collective."""
    starts, stops = [0] * tensor.ndim, list(tensor.shape)
    if not isinstance(tensor, DTensor):
        return tuple(map(slice, starts, stops))
    mesh = tensor.device_mesh
    # the last mesh dimension, tensor parallelism, shards first
    for number in reversed(range(mesh.ndim)):
        placement = tensor.placements[number]
        if not isinstance(placement, (Shard, _StridedShard)):
            continue
        dim, ranks, rank = placement.dim % tensor.ndim, mesh.size(number), mesh.get_local_rank(number)
        size = -(-(stops[dim] - starts[dim]) // ranks)  # the chunk size of torch.chunk
        starts[dim], stops[dim] = (min(starts[dim] + size * n, stops[dim]) for n in (rank, rank + 1))
    return tuple(map(slice, starts, stops))


@torch.no_grad()
def copy_into_shard(tensor: Tensor, whole: Tensor) -> None:
    """Copy this rank's slice of `whole`, of any dtype and device, into `tensor` in place. No collective."""
    local_tensor(tensor).copy_(whole[local_slices(tensor)])


def gather_full(tensor: Tensor) -> Tensor:
    """Return the whole of `tensor`. Collective if it is sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    sharded: Any = tensor
    if sharded.device.type != sharded.device_mesh.device_type:  # in CPU memory, which NCCL cannot gather
        sharded = sharded.to(sharded.device_mesh.device_type)
    if sharded.device_mesh.ndim > 1:  # FSDP's shards first: they are shards of those of tensor parallelism
        placements = [*[Replicate()] * (sharded.device_mesh.ndim - 1), sharded.placements[-1]]
        sharded = sharded.redistribute(placements=placements)
    full: Tensor = sharded.full_tensor()
    return full


def reshard(model: nn.Module) -> None:
    """Free the parameters of `model` that FSDP has gathered, so that reads and writes reach the shards.

    After a forward without gradients FSDP2 keeps the root unsharded. That is a copy: the next forward would keep using
    it and silently ignore values written to the shards.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def local_shard(weight: FileWeight, tensor: Tensor) -> tuple[Tensor, Slices] | None:
    """Return this rank's shard of `weight`, whose source is `tensor`, and its slices within `weight`. No collective.

    The shard shares the memory of `tensor`. None if this rank holds nothing of the weight. A weight that is a tensor of
    the model itself is never None, though its shard may be empty.
    """
    slices, shard = local_slices(tensor), local_tensor(tensor)
    if not weight.is_part:
        return shard, slices
    if weight.expert is not None:
        experts, slices = slices[0], slices[1:]
        if not experts.start <= weight.expert < experts.stop:
            return None
        shard = shard[weight.expert - experts.start]
    rows, *others = slices
    first, last = max(rows.start, weight.start), min(rows.stop, weight.start + weight.shape[0])
    if first >= last:
        return None
    return shard[first - rows.start : last - rows.start], (slice(first - weight.start, last - weight.start), *others)


def tensor_shards(weight: FileWeight, tensor: Tensor, prefix: str = "") -> Iterator[TensorShard]:
    """Yield this rank's shard of `weight`, if it has one, named `prefix + weight.name`; `tensor` is its source."""
    if (match := local_shard(weight, tensor.detach())) is not None:
        shard, slices = match
        yield TensorShard(prefix + weight.name, shard, tuple(one.start for one in slices), weight.shape)
