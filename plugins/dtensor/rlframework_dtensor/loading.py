"""Weights from safetensors files straight into the pieces of a split model: no process holds a whole model.

The model is made with its parameters on the meta device and buffers for real, split, and filled (`fill`): each rank
reads its piece of each weight, memory-mapped, and casts it to fp32. Checkpoints whose names are not the model's,
quantised ones and those not in safetensors take a whole copy on every process, which is logged.
"""

from __future__ import annotations

from typing import Any

import torch

from rlframework.config.policy import PolicyConfig
from rlframework.models.adapters import is_inside, outside
from rlframework.models.files import read_weights, weights_folder
from rlframework.models.loading import load_whole
from rlframework_dtensor.file_names import here
from rlframework_dtensor.offload import move_buffers
from rlframework_dtensor.shards import put


@torch.no_grad()
def fill(model: Any, config: PolicyConfig, attention: str | None, device: torch.device) -> None:
    """Give `model`, split and on the meta device, memory on `device` and the weights of `config.model_name`.

    With `policy.offload.parameters` the weights have CPU memory, and the buffers alone are on `device`.
    """
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.to_empty(device="cpu" if config.offload.parameters else device)
    for name, buffer in model.named_buffers():
        buffer.copy_(buffers[name])
    move_buffers(model, device)
    saved = set(model.state_dict())
    held = dict(model.named_parameters()) | {name: b for name, b in model.named_buffers() if name in saved}
    wanted = {outside(name): tensor for name, tensor in held.items() if not is_inside(name)}
    folder = weights_folder(config.model_name) if not getattr(model.config, "quantization_config", None) else None
    if folder is None or not read_weights(wanted, folder, model, here):
        whole = load_whole(config, attention)
        found = dict(whole.named_parameters()) | dict(whole.named_buffers())
        for name, weight in wanted.items():
            put(weight, found[name])
