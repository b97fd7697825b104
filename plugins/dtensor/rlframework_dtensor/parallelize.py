"""FSDP2 over the blocks of a model of transformers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from rlframework.config.policy import PolicyConfig
from rlframework.models.abilities import decoder_layers
from rlframework_dtensor.experts import experts_of
from rlframework_dtensor.mesh import Mesh

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def shard(model: nn.Module, mesh: Mesh, config: PolicyConfig, reshard_after_forward: bool) -> nn.Module:
    """`fully_shard` each block and then the whole, in CPU memory with `policy.offload.parameters`.

    Forward in `policy.precision`; gradients are reduced in fp32. Experts that are spread are sharded by themselves,
    over the ranks that have the same ones.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    layer_policy = MixedPrecisionPolicy(param_dtype=DTYPES[config.precision], reduce_dtype=torch.float32)
    on_cpu: dict[str, Any] = {}
    if config.offload.parameters:
        on_cpu["offload_policy"] = CPUOffloadPolicy(pin_memory=mesh.fsdp.device_type == "cuda")
    settings = {"mp_policy": layer_policy, "reshard_after_forward": reshard_after_forward, **on_cpu}
    for module in experts_of(model) if mesh.sizes.expert > 1 else ():
        fully_shard(module, mesh=mesh.expert_fsdp, **settings)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh.fsdp, **settings)
    root_policy = replace(layer_policy, output_dtype=torch.float32)
    # the root is used again at once in the backward, and the head's weight must stay whole until then
    fully_shard(model, mesh=mesh.fsdp, mp_policy=root_policy, reshard_after_forward=False, **on_cpu)
    return model
