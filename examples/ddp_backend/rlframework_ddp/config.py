"""The section `policy.ddp` and the checks of a configuration. Imports no torch."""

from __future__ import annotations

from pydantic import Field
from rlframework.config.base import Section
from rlframework.config.sections import RunConfig
from rlframework.plugins.model_checks import model_config
from rlframework.plugins.types import Problem


class DdpConfig(Section):
    """Settings of this backend alone."""

    bucket_megabytes: int = Field(25, ge=1, le=10_000, description="size of a gradient bucket in the backward")


def check(config: RunConfig, device: str) -> list[Problem]:
    """Check what the record's capabilities do not cover, before processes start. `device`: "cpu" or "cuda"."""
    if "vision_config" not in model_config(config.policy.model_name):
        return []
    message = "this backend trains text-only models, and this one also takes images."
    return [Problem("policy.model_name", message, "Choose another model, or another policy.backend.")]
