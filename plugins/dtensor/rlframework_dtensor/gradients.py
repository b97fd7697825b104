"""Gradients: when FSDP sums them over the workers, and their norm and clipping where tensors are on different meshes.

Torch's `get_total_norm` fails if tensor parallelism shards some parameters and not others.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from rlframework_dtensor.config import MEMORY_SHARE
from rlframework_dtensor.mesh import Mesh
from rlframework_dtensor.shards import local_tensor


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the gradients of the parameters that have one."""
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


@torch.no_grad()
def total_norm(gradients: Sequence[Tensor], mesh: Mesh | None) -> Tensor:
    """Return the L2 norm of the whole gradient, a scalar that is the same on every rank. Collective.

    Each element counts once: gradients that tensor parallelism shards are summed over its ranks, replicated ones are
    not.
    """
    if mesh is None:
        return nn.utils.get_total_norm(gradients)
    sharded = [local_tensor(gradient) for gradient in gradients if _is_sharded(gradient, mesh)]
    replicated = [local_tensor(gradient) for gradient in gradients if not _is_sharded(gradient, mesh)]
    squares = torch.stack([_squared_norm(part, mesh) for part in (sharded, replicated)])
    if (group := mesh.shard_group()) is not None:
        dist.all_reduce(squares, group=group)
    if (group := mesh.tensor_group()) is not None:
        dist.all_reduce(squares[:1], group=group)
    return squares.sum().sqrt().float()


def _is_sharded(gradient: Tensor, mesh: Mesh) -> bool:
    """Return True if tensor parallelism, the last dimension of the gradient's mesh, shards it."""
    if not isinstance(gradient, DTensor) or gradient.device_mesh.ndim == mesh.fsdp.ndim:
        return False
    return isinstance(gradient.placements[-1], Shard)


def _squared_norm(tensors: list[Tensor], mesh: Mesh) -> Tensor:
    device = mesh.tensor.device_type
    if not tensors:
        return torch.zeros((), dtype=torch.float64, device=device)
    return nn.utils.get_total_norm(tensors).to(device, torch.float64).square()


@torch.no_grad()
def clip(gradients: Sequence[Tensor], max_norm: float, norm: float) -> None:
    """Scale gradients of norm `norm` down to `max_norm`, in place."""
    factor = min(1.0, max_norm / (norm + 1e-6))
    if gradients:
        torch._foreach_mul_([local_tensor(gradient) for gradient in gradients], factor)


class GradientReduction:
    """Tells the FSDP modules of a model, before each backward, what to do with gradients.

    Reducing once per step saves a reduce-scatter of all gradients for each further microbatch; until then FSDP keeps
    them unsharded, in fp32. Replicas (HSDP) exchange only shards, so they do it once in any case.
    """

    def __init__(self, model: FSDPModule, when: str, device: torch.device, tensor: int) -> None:
        """`when`: `policy.dtensor.reduce_gradients`; `tensor`: the number of workers that share each weight."""
        self._model = model
        self._once = when == "step" or (when == "auto" and _fits(model, device, tensor))

    def before_backward(self, *, last: bool) -> None:
        """Prepare the backward of a microbatch; `last`: of the last one of the step."""
        if self._once:
            self._model.set_requires_gradient_sync(last)
        else:
            self._model.set_requires_all_reduce(last)
        self._model.set_is_last_backward(last)


def _fits(model: FSDPModule, device: torch.device, tensor: int) -> bool:
    if device.type != "cuda":
        return False
    whole = sum(4 * p.numel() for p in model.parameters() if p.requires_grad)  # type: ignore[attr-defined]
    return bool(MEMORY_SHARE * whole // tensor <= torch.cuda.get_device_properties(device).total_memory)
