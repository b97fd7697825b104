"""Build DeepSpeed's engine around a model from a configuration; `loading` fills in the weights.

Unsupported configurations are rejected before any weight is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlframework.base.errors import NotSupported
from rlframework.config.policy import PolicyConfig
from rlframework.engine import (
    FileLayout,
    HeadPatch,
    WorkerContext,
    adapters,
    checkpoint_activations,
    empty_model,
    freeze_part,
    is_multimodal,
    load_config,
    parameter_groups,
    probe_packing,
    require_splittable,
    require_vocabulary,
)
from rlframework_deepspeed import process_state
from rlframework_deepspeed.autotp import TensorParallel, partitioning_adapters
from rlframework_deepspeed.config import BUCKET, DeepSpeedConfig, engine_config
from rlframework_deepspeed.groups import Groups, Sizes
from rlframework_deepspeed.loading import give_memory
from rlframework_deepspeed.ulysses import require_exchange

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass
class Built:
    """DeepSpeed's engine, its model, the patched head, and how they are sharded. Weights are uninitialised."""

    engine: Any
    model: Any
    head: HeadPatch
    packs: bool
    tensor: TensorParallel
    groups: Groups
    saved_buffers: frozenset[str]
    layout: FileLayout


def build(
    config: PolicyConfig,
    section: DeepSpeedConfig,
    context: WorkerContext,
    tokenizer: Any,
    device: torch.device,
    *,
    init_optimizer: bool,
) -> Built:
    """Build the engine for `config`. Collective."""
    process_state.deepspeed_on(device)
    sizes = Sizes.of(context.world_size, config.parallelism)
    model_config = load_config(config)
    if sizes.context > 1:
        require_splittable(model_config)
        require_exchange(config, section, model_config)
    can_pack = probe_packing(config, model_config, device, section.attention)
    settings = engine_config(config, section, device=device.type)
    process_state.require_compilers(settings)
    model = empty_model(config, model_config, None if section.attention == "auto" else section.attention)
    _prepare_model(model, config, tokenizer)
    saved = model.state_dict().keys() & {name for name, _ in model.named_buffers()}
    layout = FileLayout.of(model)
    settings = _adapt_settings(settings, model, has_optimizer=init_optimizer)
    process_state.join(context, device)
    with process_state.leaving_on_failure(context):
        groups = Groups(sizes, device.type)
        engine = _engine(model, config, settings, device, init_optimizer=init_optimizer)
        tensor = TensorParallel() if sizes.tensor == 1 else TensorParallel.of(engine.module)
        head = HeadPatch(engine.module, tensor.head_rows(engine.module))
    return Built(engine, engine.module, head, can_pack, tensor, groups, frozenset(saved), layout)


def _engine(
    model: nn.Module, config: PolicyConfig, settings: dict[str, Any], device: torch.device, *, init_optimizer: bool
) -> Any:
    """DeepSpeed's engine around `model`. Collective."""
    deepspeed, several = process_state.deepspeed_on(device), config.parallelism.tensor > 1
    optimizer = _optimizer(model, config) if init_optimizer else None  # it needs the shapes, which ZeRO removes
    with process_state.building_engine(), partitioning_adapters():
        if settings["zero_optimization"]["stage"] == 3 and not several:  # AutoTP needs whole weights
            _shard_weights(deepspeed, model, settings, device)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    if several:
        engine.first_dataloader_check.remove()  # it would broadcast the first microbatch to compare it
    return engine


def _optimizer(model: nn.Module, config: PolicyConfig) -> torch.optim.Optimizer:
    section = config.optimizer
    groups = parameter_groups(model.named_parameters(), section)
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def _adapt_settings(settings: dict[str, Any], model: nn.Module, *, has_optimizer: bool) -> dict[str, Any]:
    """Adapt `settings` to `model`: cap the bucket size; without an optimizer keep only ZeRO's sharding of weights."""
    zero = dict(settings["zero_optimization"])
    if not has_optimizer:
        zero = zero if zero["stage"] == 3 else {"stage": 0}
        settings = {**settings, "bf16": {"enabled": False}, "fp16": {"enabled": False}}
    elements = sum(parameter.numel() for parameter in model.parameters())
    zero.setdefault("reduce_bucket_size", min(BUCKET, elements))
    return {**settings, "zero_optimization": zero}


def _shard_weights(deepspeed: Any, model: nn.Module, settings: dict[str, Any], device: torch.device) -> None:
    """Shard the weights of `model` one by one for stage 3, so that the whole model is never on `device`."""
    deepspeed.zero.Init(module=model, config_dict_or_path=settings, dtype=next(model.parameters()).dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _prepare_model(model: Any, config: PolicyConfig, tokenizer: Any) -> None:
    """Prepare a model before DeepSpeed wraps it; raise `NotSupported` for models this backend cannot train."""
    require_vocabulary(model, tokenizer)
    if is_multimodal(model) and config.parallelism.tensor > 1:
        raise NotSupported(
            f"{type(model).__name__} is multimodal, which this backend does not support with tensor parallelism; set "
            "policy.parallelism.tensor to 1, or policy.backend to dtensor"
        )
    if config.router_aux_loss_coef > 0:
        raise NotSupported("this backend has no load-balancing loss; set policy.router_aux_loss_coef to 0")
    if config.lora is not None:
        adapters.inject(model, config.lora)
    if config.freeze is not None:
        freeze_part(model, config.freeze)
    if config.activation_checkpointing:
        checkpoint_activations(model, config.activation_checkpointing)
    give_memory(model, DTYPES[config.precision])
