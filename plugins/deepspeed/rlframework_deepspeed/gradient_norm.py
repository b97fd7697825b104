"""The global gradient norm, and a DeepSpeed optimizer step clipped by it.

DeepSpeed's own norm relies on tensor-parallel flags that not all of its layers set, is missing without ZeRO, and is
computed in the middle of a step. So the norm is computed here and passed to DeepSpeed for clipping.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlframework.engine import replacing
from rlframework_deepspeed.shards import Shards

CLIPPED = 1e-6
"""Added to the norm before clipping divides by it, as in torch and DeepSpeed."""


@torch.no_grad()
def total_norm(shards: Shards, is_partitioned: Callable[[nn.Parameter], bool], tensor_group: Any) -> float:
    """L2 norm of the whole gradient, the same on every rank. Collective.

    Each element counts once: ZeRO shards are summed over ZeRO's ranks, tensor-parallel shards (`is_partitioned`) over
    `tensor_group` (None: one rank), and replicated parameters are not.
    """
    squares = torch.zeros(2, dtype=torch.float64, device=shards.engine.device)
    for parameter, gradient in shards.gradients():
        squares[int(is_partitioned(parameter))] += (
            torch.linalg.vector_norm(gradient, dtype=torch.float32).double().square()
        )
    if shards.splits_gradients and shards.ranks > 1:
        dist.all_reduce(squares, group=shards.group)
    if tensor_group is not None:
        dist.all_reduce(squares[1:], group=tensor_group)
    square = sum(squares.tolist())  # waits for the device, once
    return math.sqrt(square) / shards.scale() if math.isfinite(square) else square


def step(shards: Shards, norm: float, max_grad_norm: float | None, lr: float) -> bool:
    """Step at `lr`, clipped to `max_grad_norm`; return True if skipped because `norm` is not finite. Collective.

    Parameters that `shards` does not count as reached are left alone, as by torch.
    """
    if not math.isfinite(norm):
        update_scale = getattr(shards.wrapper, "_update_scale", None)
        if update_scale is not None:  # of float16
            update_scale(True)
        shards.discard()
        return True
    assert shards.adam is not None
    for group in shards.adam.param_groups:
        group["lr"] = lr
    with shards.stepping():
        return _clip_and_step(shards, norm, max_grad_norm)


def _clip_and_step(shards: Shards, norm: float, max_grad_norm: float | None) -> bool:
    if shards.wrapper is shards.adam:  # without ZeRO, in fp32, DeepSpeed has no wrapper that could clip
        if max_grad_norm is not None and norm > max_grad_norm:
            for _, gradient in shards.gradients():
                gradient.mul_(max_grad_norm / (norm + CLIPPED))
        shards.engine.step()
        return False
    shards.wrapper.clip_grad = max_grad_norm or 0.0
    with _using_norm(shards, norm * shards.scale()):
        shards.engine.step()
    return bool(shards.wrapper.overflow)


def _using_norm(shards: Shards, scaled_norm: float) -> AbstractContextManager[None]:
    """Make DeepSpeed use the finite `scaled_norm` as the norm of its gradients, without looking at each of them again.

    Its own search for infinities waits for the device, in stage 3 once for each parameter.
    """
    wrapper = shards.wrapper
    known: Tensor = torch.tensor(scaled_norm, dtype=torch.float32)  # on the CPU, so that reading it does not wait
    if hasattr(wrapper, "_get_norm_groups"):  # stage 3
        return replacing(wrapper, _get_norm_groups=lambda: [known], has_overflow=_no_overflow)
    if hasattr(wrapper, "scaled_global_norm"):  # stages 1 and 2
        return replacing(wrapper, scaled_global_norm=lambda: known, has_overflow=_no_overflow)
    unscale = wrapper.unscale_and_clip_grads  # stage 0 in half precision, which works out a norm of its own first
    return replacing(wrapper, unscale_and_clip_grads=lambda _: unscale(scaled_norm))


def _no_overflow(partition_gradients: bool = True) -> bool:
    return False
