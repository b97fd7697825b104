"""From a configuration to DeepSpeed's engine around a model, to be filled (`loading`), ready for the step.

What cannot be is refused before a weight is loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from rlframework.config.policy import PolicyConfig
from rlframework.errors import NotSupported
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.models import adapters, attention, context_parallel, ulysses
from rlframework.models.abilities import checkpoint_activations
from rlframework.models.context_limits import require_splittable
from rlframework.models.loading import empty_model, is_multimodal, load_config, require_vocabulary
from rlframework.models.probing import try_kind
from rlframework.policy.head.patch import HeadPatch
from rlframework.policy.optimization import parameter_groups
from rlframework_deepspeed import environment
from rlframework_deepspeed.autotp import TensorParallel, cutting_adapters
from rlframework_deepspeed.config import DeepSpeedConfig, engine_config
from rlframework_deepspeed.groups import Groups, Sizes
from rlframework_deepspeed.loading import give_memory
from rlframework_deepspeed.ulysses import require_exchange

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
BUCKET = 500_000_000
"""Elements of a bucket in which ZeRO adds gradients up, where nobody says: as DeepSpeed, but no more than the model."""


@dataclass
class Built:
    """DeepSpeed's engine, the model inside, its head for `HeadPatch.computing`, and how both are split.

    The weights have any values.
    """

    engine: Any
    model: Any
    head: HeadPatch
    packs: bool
    tensor: TensorParallel
    groups: Groups
    saved_buffers: frozenset[str]


def build(
    config: PolicyConfig,
    section: DeepSpeedConfig,
    context: WorkerContext,
    tokenizer: Any,
    device: torch.device,
    *,
    init_optimizer: bool,
) -> Built:
    """Collective."""
    attention.register()
    context_parallel.register()
    ulysses.register()
    environment.deepspeed_on(device)
    sizes = Sizes.of(context.world_size, config.parallelism)
    model_config = load_config(config)
    if sizes.context > 1:
        require_splittable(model_config)
        require_exchange(config, section, model_config)
    can_pack = try_kind(config, model_config, device, section.attention)
    settings = engine_config(config, section, device=device.type)
    environment.require_compilers(settings)
    model = empty_model(config, model_config, None if section.attention == "auto" else section.attention)
    _ready(model, config, tokenizer)
    saved = model.state_dict().keys() & {name for name, _ in model.named_buffers()}
    settings = _settled(settings, model, has_optimizer=init_optimizer)
    environment.join(context, device)
    with environment.leaving_on_failure(context):
        groups = Groups(sizes, device.type)
        engine = _engine(model, config, settings, device, init_optimizer=init_optimizer)
        tensor = TensorParallel() if sizes.tensor == 1 else TensorParallel.of(engine.module)
        head = HeadPatch(engine.module, tensor.head_rows(engine.module))
    return Built(engine, engine.module, head, can_pack, tensor, groups, frozenset(saved))


def _engine(
    model: nn.Module, config: PolicyConfig, settings: dict[str, Any], device: torch.device, *, init_optimizer: bool
) -> Any:
    """DeepSpeed's engine around `model`. Collective."""
    deepspeed, several = environment.deepspeed_on(device), config.parallelism.tensor > 1
    optimizer = _optimizer(model, config) if init_optimizer else None  # it looks at shapes, which ZeRO takes away
    with environment.making(), cutting_adapters():
        if settings["zero_optimization"]["stage"] == 3 and not several:  # AutoTP takes whole weights
            _deal_out(deepspeed, model, settings, device)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, dist_init_required=False)
    if several:
        engine.first_dataloader_check.remove()  # it would send the first microbatch around, to compare
    return engine


def _optimizer(model: nn.Module, config: PolicyConfig) -> torch.optim.Optimizer:
    section = config.optimizer
    groups = parameter_groups(model.named_parameters(), section)
    return torch.optim.AdamW(groups, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)


def _settled(settings: dict[str, Any], model: nn.Module, *, has_optimizer: bool) -> dict[str, Any]:
    """`settings` for `model`: buckets no larger than it, and without an optimizer no more of ZeRO than weights."""
    zero = dict(settings["zero_optimization"])
    if not has_optimizer:
        zero = zero if zero["stage"] == 3 else {"stage": 0}
        settings = {**settings, "bf16": {"enabled": False}, "fp16": {"enabled": False}}
    elements = sum(parameter.numel() for parameter in model.parameters())
    zero.setdefault("reduce_bucket_size", min(BUCKET, elements))
    return {**settings, "zero_optimization": zero}


def _deal_out(deepspeed: Any, model: nn.Module, settings: dict[str, Any], device: torch.device) -> None:
    """Deal the weights of `model` out one by one, for stage 3: as a whole it would go to `device` first."""
    deepspeed.zero.Init(module=model, config_dict_or_path=settings, dtype=next(model.parameters()).dtype)
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))


def _ready(model: Any, config: PolicyConfig, tokenizer: Any) -> None:
    """What is done to a model before DeepSpeed has it."""
    require_vocabulary(model, tokenizer)
    if is_multimodal(model):
        raise NotSupported(
            f"{type(model).__name__} takes more than text, which this backend does not do; set policy.backend=dtensor"
        )
    if config.router_aux_loss_coef > 0:
        raise NotSupported("this backend has no loss of the routers; set policy.router_aux_loss_coef to 0")
    if config.lora is not None:
        adapters.inject(model, config.lora)
    if config.activation_checkpointing:
        checkpoint_activations(model)
    give_memory(model, DTYPES[config.precision])
