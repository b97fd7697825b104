"""The section `policy.megatron`, and the plain word that this backend does not train yet."""

from __future__ import annotations

from rlframework.config.base import Section
from rlframework.config.sections import RunConfig
from rlframework.plugins.types import Problem

NOT_YET = "The megatron backend comes in a later release: this one only registers its name."
INSTEAD = "Set policy.backend to dtensor."


class MegatronConfig(Section):
    """What only the megatron backend has: nothing yet."""


def check(config: RunConfig, device: str) -> list[Problem]:
    """One problem, whatever the configuration, so that choosing this backend fails before a process starts."""
    return [Problem("policy.backend", NOT_YET, INSTEAD)]
