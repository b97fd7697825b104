"""The section `policy.dtensor`, and what of a configuration this backend cannot do. Imports no torch."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

from pydantic import Field

from rlframework.config.base import Section
from rlframework.config.sections import RunConfig
from rlframework.plugins.types import Problem


class DTensorConfig(Section):
    """What only the dtensor backend has."""

    attention: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        "auto", description="attention of transformers; auto: sdpa, and attention by segments for packed rows"
    )
    reshard_after_forward: bool = Field(
        True, description="free the gathered weights after each forward; false: keep them until the backward"
    )


def check(config: RunConfig, device: str) -> list[Problem]:
    """What the capabilities of the record do not say: `device` is "cpu" or "cuda"."""
    section = getattr(config.policy, "dtensor", None) or DTensorConfig()
    if section.attention != "flash_attention_2":
        return []
    problems, key = [], "policy.dtensor.attention"
    if device != "cuda":
        problems.append(Problem(key, f"flash_attention_2 needs a GPU, and the device is {device}.", "Set it to auto."))
    elif find_spec("flash_attn") is None:
        problems.append(
            Problem(key, "flash_attention_2 needs the package flash-attn.", "Install it, or set it to auto.")
        )
    if config.policy.precision == "float32":
        hint = "Set policy.precision to bfloat16, or the attention to auto."
        problems.append(Problem(key, "flash_attention_2 does not compute in float32.", hint))
    return problems
