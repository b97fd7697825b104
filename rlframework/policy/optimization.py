"""Optimizer parameter groups and the learning-rate schedule: core owns both, so they are the same for every engine."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from rlframework.config.policy import SchedulerConfig
from rlframework.errors import ConfigError

if TYPE_CHECKING:
    from torch.nn import Parameter

    from rlframework.config.policy import OptimizerConfig


def parameter_groups(
    named_parameters: Iterable[tuple[str, Parameter]], config: OptimizerConfig
) -> list[dict[str, Any]]:
    """Trainable parameters in two groups: weight decay for two and more dimensions, none for fewer."""
    trainable = [parameter for _, parameter in named_parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def learning_rate(base: float, config: SchedulerConfig, step: int) -> float:
    """Learning rate of training call `step` (from 0): linear warm-up to `base`, then the decay of `config.name`."""
    if step < config.warmup_steps:
        return base * (step + 1) / config.warmup_steps
    if config.name == "constant":
        return base
    assert config.total_steps is not None
    progress = min(1.0, (step - config.warmup_steps) / max(1, config.total_steps - config.warmup_steps))
    shape = 1.0 - progress if config.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return base * (config.min_ratio + (1.0 - config.min_ratio) * shape)


def resolve_total_steps(config: SchedulerConfig, num_steps: int) -> SchedulerConfig:
    """`config` with `total_steps` filled in from the run's length; a warm-up longer than that is a `ConfigError`."""
    total = config.total_steps or num_steps
    if config.name != "constant" and config.warmup_steps >= total:
        raise ConfigError(
            f"policy.scheduler.warmup_steps is {config.warmup_steps}, but the schedule ends after {total} steps; "
            f"take fewer warm-up steps or set policy.scheduler.total_steps"
        )
    return config.model_copy(update={"total_steps": total})
