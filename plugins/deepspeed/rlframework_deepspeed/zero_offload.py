"""Offload a worker's state from the GPU to CPU memory between calls, and onload it. On a CPU nothing moves.

With ZeRO, DeepSpeed moves whole categories of state, through pinned memory of its own; state that `policy.offload` or
`policy.deepspeed` keeps in CPU memory stays there. Without ZeRO or without an optimizer, this module moves it, through
pinned memory that is kept (`rlframework.policy.host_buffers`). Untested on a GPU.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from rlframework.engine import HostBuffers
from rlframework_deepspeed.shards import Shards


def move(shards: Shards, device: torch.device, host: HostBuffers, *, model: bool, optimizer: bool) -> int:
    """Move weights and buffers (`model`) or the optimizer state to `device`; return the bytes moved.

    `host`: CPU memory for what DeepSpeed does not move, kept between calls.
    """
    if shards.engine.device.type == "cpu":
        return 0
    if not hasattr(shards.wrapper, "offload_states"):
        return _move_plainly(shards, device, host, model=model, optimizer=optimizer)
    kinds = import_module("deepspeed.runtime.zero.offload_config").OffloadStateTypeEnum
    weights = {kinds.lp_params, kinds.hp_params, kinds.lp_grads, kinds.contiguous_grad_buffer}
    wanted = (weights if model else set()) | ({kinds.optim_states} if optimizer else set())
    if shards.engine.zero_offload_param() is not None:
        wanted -= weights
    before = _bytes_on(shards, device)
    if device.type == "cpu":
        shards.engine.offload_states(include=list(wanted))
    else:
        _reload(shards.wrapper, wanted)
    if model:
        _move_buffers(shards, device)
    return _bytes_on(shards, device) - before


def _reload(wrapper: Any, wanted: set[Any]) -> None:
    """Onload only `wanted`; DeepSpeed onloads everything, so hide the rest from it."""
    others = wrapper.offloaded_states - wanted
    wrapper.offloaded_states -= others
    try:
        wrapper.reload_states()
    finally:
        wrapper.offloaded_states |= others


def _move_plainly(shards: Shards, device: torch.device, host: HostBuffers, *, model: bool, optimizer: bool) -> int:
    before = _bytes_on(shards, device)
    weights = (*_main_params(shards), *shards.engine.module.parameters()) if model else ()
    states = shards.adam.state.values() if optimizer and shards.adam is not None else ()
    host.move_in_place(weights, states, device)
    if model:
        _move_buffers(shards, device)
    return _bytes_on(shards, device) - before


def _move_buffers(shards: Shards, device: torch.device) -> None:
    for module in shards.engine.module.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _main_params(shards: Shards) -> list[Tensor]:
    """The tensors that the optimizer updates."""
    found = {
        id(slot.holder): slot.holder
        for one in shards.engine.module.parameters()
        if (slot := shards.slot(one)) is not None
    }
    return list(found.values())


def _bytes_on(shards: Shards, device: torch.device) -> int:
    """Bytes of weights, buffers and optimizer state on the type of `device`, counting shared memory once."""
    module = shards.engine.module
    parameters = [getattr(one, "ds_tensor", one) for one in module.parameters()]
    states = [] if shards.adam is None else [v for state in shards.adam.state.values() for v in state.values()]
    tensors = [*parameters, *module.buffers(), *_main_params(shards), *(v for v in states if isinstance(v, Tensor))]
    found = {tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor.device.type == device.type}
    return sum(found.values())
