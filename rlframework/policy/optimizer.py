"""The optimizer's parameter groups: the same for every engine."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

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
