"""Defaults that depend on the device or on other settings.

`rlframework.plugins.configure.load_config` sets these keys if the user does not.

A run's own `config.yaml` has their values, so a run that is resumed elsewhere keeps them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlframework.config.sections import RunConfig


@dataclass(frozen=True)
class Default:
    """The value of the dotted `key` on a device, and the reason for it, which `rlframework config` prints.

    `where` the value is the default: on a GPU, or with other settings.
    """

    key: str
    value: Any
    reason: str
    where: str = "on a GPU"


def checkpoint_defaults(config: RunConfig) -> list[Default]:
    """Return the defaults of the best checkpoint: with early stopping, it is that of the metric which ends the run."""
    stopping, given = config.algorithm.early_stopping, config.checkpoints
    if stopping is None or ("metric" in given.model_fields_set and given.metric != stopping.metric):
        return []
    values = {"checkpoints.metric": stopping.metric, "checkpoints.best": stopping.best}
    reason = "the best checkpoint is that of the step which early stopping names"
    return [Default(key, value, reason, "with algorithm.early_stopping") for key, value in values.items()]


def device_defaults(config: RunConfig, device: str, *, bfloat16: bool) -> list[Default]:
    """Return core's defaults on `device`, "cpu" or "cuda"; `bfloat16`: whether the backend trains in that precision."""
    if device != "cuda":
        return []
    defaults = [
        Default(
            "policy.tf32", True, "fp32 products run on tensor cores, about 8 times as fast, with 10 bits of mantissa"
        )
    ]
    if config.generation.name == "transformers":  # another engine may manage its memory by means that exclude them
        reason = "the lengths of rows change, and memory that is extended in place does not fragment"
        defaults.append(Default("policy.expandable_segments", True, reason))
    if bfloat16:
        reason = "matrix products and attention have fast kernels only in half precision; main weights stay in fp32"
        defaults.append(Default("policy.precision", "bfloat16", reason))
    return defaults
