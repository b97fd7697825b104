"""The section `policy.ddp`, and what of a configuration is refused. Imports no torch."""

from __future__ import annotations

from pydantic import Field, PositiveInt
from rlframework.config.base import Section
from rlframework.config.sections import RunConfig
from rlframework.plugins.model_checks import model_config
from rlframework.plugins.types import Problem


class DdpConfig(Section):
    """What only this backend has."""

    bucket_megabytes: PositiveInt = Field(25, description="gradients that are sent at once while the backward goes on")


def check(config: RunConfig, device: str) -> list[Problem]:
    """What the capabilities of the record do not say; asked before a process starts. `device`: "cpu" or "cuda"."""
    if "vision_config" not in model_config(config.policy.model_name):
        return []
    message = "this backend trains models of text alone, and this one takes images too."
    return [Problem("policy.model_name", message, "Take another model, or another policy.backend.")]
