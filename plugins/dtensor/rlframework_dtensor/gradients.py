"""The norm of a gradient whose tensors lie on different meshes, and clipping by it.

Torch's own (`get_total_norm`) fails where some parameters are cut by tensor parallelism and others are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from rlframework_dtensor.mesh import Mesh
from rlframework_dtensor.shards import local


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that are there."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor], mesh: Mesh | None) -> Tensor:
    """L2 norm of the whole gradient, a scalar, the same on every rank. Collective.

    Each element counts once: what tensor parallelism cuts is added up over its ranks, what it copies is not.
    """
    if mesh is None:
        return nn.utils.get_total_norm(gradients)
    cut = [local(gradient) for gradient in gradients if _is_cut(gradient, mesh)]
    copied = [local(gradient) for gradient in gradients if not _is_cut(gradient, mesh)]
    squares = torch.stack([_square_norm(part, mesh) for part in (cut, copied)])
    if (group := mesh.shard_group()) is not None:
        dist.all_reduce(squares, group=group)
    if (group := mesh.tensor_group()) is not None:
        dist.all_reduce(squares[:1], group=group)
    return squares.sum().sqrt().float()


def _is_cut(gradient: Tensor, mesh: Mesh) -> bool:
    """Whether tensor parallelism cuts it: its dimension is the last of the gradient's mesh."""
    if not isinstance(gradient, DTensor) or gradient.device_mesh.ndim == mesh.fsdp.ndim:
        return False
    return isinstance(gradient.placements[-1], Shard)


def _square_norm(tensors: list[Tensor], mesh: Mesh) -> Tensor:
    device = mesh.tensor.device_type
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return nn.utils.get_total_norm(tensors).to(device, torch.float64).square()


@torch.no_grad()
def clip(gradients: Sequence[Tensor], max_norm: float, norm: float) -> None:
    """Scale the gradients, whose norm is `norm`, down to `max_norm`, in place."""
    factor = min(1.0, max_norm / (norm + 1e-6))
    for gradient in gradients:
        local(gradient).mul_(factor)
