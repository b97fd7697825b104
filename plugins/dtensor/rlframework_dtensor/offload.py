"""Moving a model and its optimizer between a GPU and CPU memory, FSDP's pieces, buffers and moments included.

`move_to_device` and the like are NeMo-RL's names for it. On a CPU nothing moves. With `policy.offload.parameters` FSDP
itself keeps the weights in CPU memory and takes them to the device block by block; then the optimizer's step is on the
CPU, and only buffers move.
"""

from __future__ import annotations

import gc

import torch
from torch import Tensor, nn

from rlframework_dtensor.shards import local


def move_model(model: nn.Module, device: torch.device, *, buffers_only: bool) -> int:
    """`model`'s buffers and, unless `buffers_only`, its parameters (this rank's pieces) to `device`; bytes moved."""
    moved = move_buffers(model, device)
    if not buffers_only:
        moved += sum(_bytes_elsewhere(parameter, device) for parameter in model.parameters())
        model.to(device)
    return moved


def move_buffers(model: nn.Module, device: torch.device) -> int:
    """The buffers alone, which FSDP does not look after; bytes moved."""
    moved = 0
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.device.type != device.type:
                moved += buffer.nbytes
                setattr(module, name, buffer.to(device))
    return moved


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """All tensors of the optimizer's state to `device`; bytes moved."""
    moved = 0
    for state in optimizer.state.values():
        for name, value in state.items():
            if isinstance(value, Tensor):
                moved += _bytes_elsewhere(value, device)
                state[name] = value.to(device)
    return moved


def _bytes_elsewhere(tensor: Tensor, device: torch.device) -> int:
    part = local(tensor)
    return 0 if part.device.type == device.type else part.nbytes


class ModelMoves:
    """NeMo-RL's names for moving a model, for those who know them."""

    @staticmethod
    def move_to_device(model: nn.Module, device: str | torch.device) -> nn.Module:
        """`model`, moved to `device` with its buffers."""
        move_model(model, torch.device(device), buffers_only=False)
        return model

    @staticmethod
    def move_buffer_to_device(model: nn.Module, device: str | torch.device) -> nn.Module:
        """`model`, its buffers moved to `device`."""
        move_buffers(model, torch.device(device))
        return model

    def move_to_cuda(self, model: nn.Module) -> nn.Module:
        """`model` on the GPU, and what nobody needs given back."""
        return _tidied(self.move_to_device(model, "cuda"))

    def move_to_cpu(self, model: nn.Module) -> nn.Module:
        """`model` in CPU memory, and what nobody needs given back."""
        return _tidied(self.move_to_device(model, "cpu"))


def _tidied(model: nn.Module) -> nn.Module:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return model
