"""Move a model and its optimizer between a GPU and CPU memory, including FSDP's shards, buffers and moments.

On a CPU nothing moves. With `policy.offload.parameters` FSDP itself keeps the weights in CPU memory and copies them to
the device block by block; the optimizer then steps on the CPU, and only buffers move.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rlframework_dtensor.shards import local_tensor


def move_model(model: nn.Module, device: torch.device, *, buffers_only: bool) -> int:
    """Move the buffers of `model` and, unless `buffers_only`, its parameters (this rank's shards); return the bytes."""
    moved = move_buffers(model, device)
    if not buffers_only:
        moved += sum(_bytes_to_move(parameter, device) for parameter in model.parameters())
        model.to(device)
    return moved


def move_buffers(model: nn.Module, device: torch.device) -> int:
    """Move only the buffers, which FSDP does not manage; return the bytes moved."""
    moved = 0
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type != device.type:
                moved += buffer.nbytes
                setattr(module, name, buffer.to(device))
    return moved


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """Move all tensors of the optimizer's state to `device`; return the bytes moved."""
    moved = 0
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                moved += _bytes_to_move(value, device)
                state[name] = value.to(device)
    return moved


def _bytes_to_move(tensor: Tensor, device: torch.device) -> int:
    local = local_tensor(tensor)
    return 0 if local.device.type == device.type else local.nbytes
