"""Move a model and its optimizer between a GPU and CPU memory, including FSDP's shards, buffers and moments.

The bytes of parameters and moments move through CPU memory that is pinned and kept (`rlframework.policy.host_buffers`).
On a CPU nothing moves. With `policy.offload.parameters` FSDP itself keeps the weights in CPU memory and copies them to
the device block by block; the optimizer then steps on the CPU, and only buffers move.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

import torch
from torch import Tensor, nn

from rlframework.engine import HostBuffers
from rlframework_dtensor.shards import local_tensor, reshard, with_local

Key = TypeVar("Key", bound=Hashable)


def move_model(model: nn.Module, device: torch.device, host: HostBuffers, *, buffers_only: bool = False) -> int:
    """Move the buffers of `model` and, unless `buffers_only`, its parameters (this rank's shards); return the bytes.

    FSDP does not manage buffers. `host`: CPU memory for all of them, kept between calls.
    """
    tensors: dict[str, Tensor] = dict(model.named_buffers())
    if not buffers_only:
        reshard(model)  # otherwise a gathered copy would move instead
        tensors |= dict(model.named_parameters())
    values, size = _moved(tensors, device, host)
    by_id = {id(tensors[name]): value for name, value in values.items()}

    def replacement(tensor: Tensor) -> Tensor:
        """A tied weight has moved by the time that torch asks again; a gradient was not moved above."""
        return by_id.get(id(tensor), tensor).to(device) if _is_elsewhere(tensor, device) else tensor

    if not buffers_only:
        model._apply(replacement)
        return size
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, replacement(buffer))
    return size


def move_optimizer(optimizer: torch.optim.Optimizer, device: torch.device, host: HostBuffers) -> int:
    """Move all tensors of the optimizer's state to `device`; return the bytes moved. See `move_model` for `host`."""
    states = list(optimizer.state.values())
    tensors = {
        (index, name): value
        for index, state in enumerate(states)
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    values, size = _moved(tensors, device, host)
    for (index, name), value in values.items():
        states[index][name] = value
    return size


def _moved(tensors: Mapping[Key, Tensor], device: torch.device, host: HostBuffers) -> tuple[dict[Key, Tensor], int]:
    """Those of `tensors` that are elsewhere, on `device`; and their bytes."""
    elsewhere = {key: local for key, tensor in tensors.items() if _is_elsewhere(local := local_tensor(tensor), device)}
    moved = host.moved(elsewhere, device)
    size = sum(local.nbytes for local in elsewhere.values())
    return {key: with_local(tensors[key], local) for key, local in moved.items()}, size


def _is_elsewhere(tensor: Tensor, device: torch.device) -> bool:
    return tensor.device.type != device.type
