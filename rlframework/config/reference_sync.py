"""The key `reference_sync` of algorithms with a reference policy."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from rlframework.config.base import Section
from rlframework.config.numbers import Count

Share = Annotated[float, Field(gt=0.0, le=1.0)]
"""A share that is not 0."""


class ReferenceSyncConfig(Section):
    """Updates of the reference policy during a run (TR-DPO, arXiv:2404.09656); the defaults are TRL's."""

    steps: Count = Field(512, description="training steps from one update to the next")
    alpha: Share = Field(
        0.6, description="the reference becomes alpha x policy + (1 - alpha) x reference; 1: a copy of the policy"
    )


class WithReferenceSync(Section):
    """The key of an algorithm that may have a reference policy."""

    reference_sync: ReferenceSyncConfig | None = Field(
        None,
        description="move the reference policy toward the trained one every so many steps; null: it keeps the weights "
        "that the run starts from",
    )
