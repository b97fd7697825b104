"""The entry point: the record of the generation engine `vllm`. Imports neither torch nor vLLM."""

from __future__ import annotations

from rlframework.config.sections import GenerationConfig
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, GenerationEngineRecord
from rlframework_vllm.checks import check, describe
from rlframework_vllm.config import VllmGenerationConfig


@hookimpl
def rlframework_generation_engines() -> list[GenerationEngineRecord]:
    """Return the record selected by `generation.name: vllm`."""
    refits = frozenset({Capability.COLLECTIVE_REFIT, Capability.IPC_REFIT, Capability.LORA_REFIT})
    return [
        GenerationEngineRecord(
            name="vllm",
            target="rlframework_vllm.engine:VllmEngine",
            summary="vLLM in processes of its own, in the same Python environment or in another one",
            api_version=2,
            capabilities=refits | {Capability.IN_FLIGHT_UPDATE, Capability.MULTIMODAL},
            config_model=VllmGenerationConfig,
            check=check,
            longest_row=_longest_row,
            gpus_per_engine=_gpus,
            stages_weights=lambda config: _gpus(config) == 1,  # several GPUs copy from shared memory of the host
            describe=describe,
        )
    ]


def _longest_row(config: GenerationConfig) -> int | None:
    return config.vllm.max_model_len if isinstance(config, VllmGenerationConfig) else None


def _gpus(config: GenerationConfig) -> int:
    return config.vllm.tensor_parallel_size if isinstance(config, VllmGenerationConfig) else 1
