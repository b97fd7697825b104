"""The entry point: the record of the generation engine `transformers`, and its keys.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rlframework.config.numbers import TokensOrZero
from rlframework.config.sections import GenerationConfig
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, GenerationEngineRecord


class TransformersGenerationConfig(GenerationConfig):
    """Settings of the generation engine `transformers`."""

    session_cache_tokens: TokensOrZero = Field(
        32_768, description="tokens of sessions whose keys and values are kept for their next turns, on each worker"
    )
    cache_after_update: Literal["recompute", "keep"] = Field(
        "recompute", description="keys and values of requests that are in progress when weights are updated"
    )


@hookimpl
def rlframework_generation_engines() -> list[GenerationEngineRecord]:
    """Return the record selected by `generation.name: transformers`."""
    refits = frozenset({Capability.COLLECTIVE_REFIT, Capability.IPC_REFIT, Capability.LORA_REFIT})
    return [
        GenerationEngineRecord(
            "transformers",
            "rlframework_transformers.engine:TransformersEngine",
            api_version=2,
            summary="generation with transformers, in the trainer's process or in separate ones",
            capabilities=refits | {Capability.EMBEDDED_GENERATION, Capability.IN_FLIGHT_UPDATE, Capability.MULTIMODAL},
            config_model=TransformersGenerationConfig,
        )
    ]
