"""The keys of `generation` for `transformers`."""

from typing import Literal

from pydantic import Field

from rlframework.config.numbers import TokensOrZero
from rlframework.config.sections import GenerationConfig


class TransformersGenerationConfig(GenerationConfig):
    """Settings of the generation engine `transformers`."""

    session_cache_tokens: TokensOrZero = Field(
        32_768, description="tokens of sessions whose keys and values are kept for their next turns, on each worker"
    )
    cache_after_update: Literal["recompute", "keep"] = Field(
        "recompute", description="keys and values of requests that are in progress when weights are updated"
    )
