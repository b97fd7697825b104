"""The entry point: the record of the generation engine `transformers`. Imports neither torch nor transformers."""

from __future__ import annotations

from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, GenerationEngineRecord
from rlframework_transformers.config import TransformersGenerationConfig


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
