"""Optimizer parameter groups and the learning-rate schedule, owned by core so that all engines share them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from torch import nn
from torch.nn import Parameter

from rlframework.base.errors import ConfigError
from rlframework.config.policy import OptimizerConfig, SchedulerConfig


def parameter_groups(
    named_parameters: Iterable[tuple[str, Parameter]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Group trainable parameters: weight decay for those with two or more dimensions, none for the others."""
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    matrices, others = [p for p in trainable if p.ndim >= 2], [p for p in trainable if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def layer_matrices(model: nn.Module) -> list[Parameter]:
    """Return the trainable parameters of two dimensions in the layers of a transformers model.

    Embeddings, the head and everything else outside the base model are left out. Muon is for these.
    """
    layers: nn.Module = getattr(model, "base_model", model)
    modules = [module for module in layers.modules() if not isinstance(module, nn.Embedding)]
    found = (parameter for module in modules for parameter in module.parameters(recurse=False))
    return [parameter for parameter in found if parameter.requires_grad and parameter.ndim == 2]


def learning_rate(base: float, config: SchedulerConfig, step: int) -> float:
    """Return the learning rate of training call `step` (from 0): linear warmup from 0, then the decay of `config.name`.

    The same as the schedules of transformers, whose first step with warmup has the learning rate 0.
    """
    if step < config.warmup_steps:
        return base * step / config.warmup_steps
    if config.name == "constant":
        return base
    assert config.total_steps is not None
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    shape = 1.0 - progress if config.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return base * (config.min_ratio + (1.0 - config.min_ratio) * shape)


def resolve_total_steps(config: SchedulerConfig, num_steps: int) -> SchedulerConfig:
    """Fill in `total_steps` from the run's length; raise `ConfigError` if the warmup is longer than that."""
    total = config.total_steps or num_steps
    if config.name != "constant" and config.warmup_steps >= total:
        raise ConfigError(
            f"policy.scheduler.warmup_steps is {config.warmup_steps}, but the schedule ends after {total} steps; "
            "lower warmup_steps or set policy.scheduler.total_steps"
        )
    return config.model_copy(update={"total_steps": total})
