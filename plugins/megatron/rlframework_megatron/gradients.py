"""The global gradient norm, waiting for the device once.

Megatron-core's own function reads the norm of each gradient on the host unless Transformer Engine or Apex is installed.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def single_optimizers(inner: Any) -> list[Any]:
    """Megatron-core's optimizers in `inner`: one for dense weights and, if there are experts, one for experts."""
    return list(getattr(inner, "chained_optimizers", [inner]))


@torch.no_grad()
def total_norm(inner: Any, device: torch.device) -> float:
    """Return the L2 norm of the gradients of the megatron-core optimizer `inner`, as its `get_grad_norm`. Collective.

    Replicated elements count once; `inner` may chain several optimizers, whose gradients are reduced by other groups.
    """
    parts = single_optimizers(inner)
    if len(parts) > 1 and inner.grads_states_parallel_group_is_shared():
        gradients = [gradient for part in parts for gradient in part.get_main_grads_for_grad_norm()]
        squares = [_reduced_square(gradients, parts[0], device)]
    else:
        squares = [_reduced_square(part.get_main_grads_for_grad_norm(), part, device) for part in parts]
    norms = [square**0.5 for square in torch.stack(squares).tolist()]
    return norms[0] if len(norms) == 1 else math.sqrt(sum(norm**2 for norm in norms))


def _reduced_square(gradients: list[Tensor], optimizer: Any, device: torch.device) -> Tensor:
    """The squared norm of `gradients`, summed over the ranks that have other gradients of `optimizer`; a scalar."""
    norm = torch.zeros((), device=device)
    if gradients:
        norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients)))
    square = norm.square()
    dist.all_reduce(square, group=optimizer.get_grad_stats_parallel_group())
    return square
