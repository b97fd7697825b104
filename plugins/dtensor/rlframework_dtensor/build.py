"""From a configuration to a model that is split over its workers, filled, and ready for the step.

One process in fp32 keeps the plain module: there is nothing to split or cast, and generation can share it. What cannot
be is refused before a weight is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from rlframework.config.policy import LoraConfig, PolicyConfig
from rlframework.errors import NotSupported
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.models import adapters, attention, context_parallel
from rlframework.models.abilities import checkpoint_activations
from rlframework.models.context_limits import require_splittable
from rlframework.models.loading import empty_model, is_multimodal, load_config, load_model, require_vocabulary
from rlframework.models.probing import try_kind
from rlframework.policy.head.patch import HeadPatch
from rlframework.workers import process_groups
from rlframework_dtensor import experts
from rlframework_dtensor.compile import compile_blocks
from rlframework_dtensor.config import DTensorConfig
from rlframework_dtensor.loading import fill
from rlframework_dtensor.mesh import Mesh, Sizes
from rlframework_dtensor.parallelize import shard
from rlframework_dtensor.shards import put
from rlframework_dtensor.tensor_parallel import require_divisible, split


@dataclass
class Built:
    """The model on the device, its head for `HeadPatch.computing`, its mesh (None: one plain module)."""

    model: Any
    head: HeadPatch
    mesh: Mesh | None
    packs: bool


def build_model(
    config: PolicyConfig,
    section: DTensorConfig,
    context: WorkerContext,
    sizes: Sizes,
    tokenizer: Any,
    device: torch.device,
) -> Built:
    """Collective where there are several workers."""
    attention.register()
    context_parallel.register()
    model_config = load_config(config)
    if sizes.context > 1:
        require_splittable(model_config)
    require_divisible(model_config, sizes.tensor)
    experts.require_experts(model_config, sizes.expert, config.router_aux_loss_coef > 0)
    can_pack = try_kind(config, model_config, device, section.attention)
    choice = None if section.attention == "auto" else section.attention
    if context.world_size == 1 and config.precision == "float32" and not config.offload.parameters:
        model = load_model(config, choice)
        _ready(model, config, section, tokenizer, sizes)
        if config.lora is not None:
            adapters.initialize(model, config.lora, put)
        model = model.to(device)
        return Built(model, HeadPatch(model), None, can_pack)
    model = empty_model(config, model_config, choice)
    _ready(model, config, section, tokenizer, sizes)
    process_groups.join(context, device)
    mesh = Mesh(sizes, device.type)
    rows = None
    if sizes.tensor > 1:
        rows = split(model, mesh.tensor, sequence=config.parallelism.sequence, custom_plan=section.custom_parallel_plan)
    if sizes.expert > 1:
        experts.spread(model, mesh.expert)
    if config.lora is not None:
        adapters.freeze(model)
    head = HeadPatch(model, rows)
    shard(model, mesh, config, section.reshard_after_forward)
    fill(model, config, choice, device)
    if config.lora is not None:
        adapters.initialize(model, config.lora, put)
    return Built(model, head, mesh, can_pack)


def _ready(model: Any, config: PolicyConfig, section: DTensorConfig, tokenizer: Any, sizes: Sizes) -> None:
    """What is done to a model before it is split."""
    require_vocabulary(model, tokenizer)
    if sizes.tensor > 1 and is_multimodal(model):
        raise NotSupported(
            f"{type(model).__name__} takes more than text, which tensor parallelism does not do; "
            "set policy.parallelism.tensor to 1"
        )
    if config.lora is not None:
        _put_adapters(model, config.lora)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    if section.compile:
        compile_blocks(model)


def _put_adapters(model: Any, section: LoraConfig) -> None:
    if is_multimodal(model):
        raise NotSupported(f"{type(model).__name__} takes more than text, which LoRA does not do; unset policy.lora")
    adapters.inject(model, section)
