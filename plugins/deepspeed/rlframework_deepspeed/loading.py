"""Load safetensors files into a model sharded by DeepSpeed, without a whole copy in any process.

DeepSpeed receives the model in uninitialised memory, which the operating system commits only when written: it shards
weights one at a time and frees each. Then each rank reads its shards, memory-mapped, as fp32, also for half-precision
models, so that their fp32 weights equal the files. Checkpoints with other weight names, quantised ones and other
formats require a whole copy in every process, which is logged.
"""

from __future__ import annotations

import torch
from torch import nn


def give_memory(model: nn.Module, dtype: torch.dtype) -> None:
    """Move the meta parameters of `model` to uninitialised CPU memory as `dtype`, keeping ties."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device="cpu", dtype=dtype)
                    made[parameter] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
                setattr(module, name, made[parameter])
