"""The entry point: the record of the generation engine `vllm`. Imports neither torch nor vLLM."""

from __future__ import annotations

from collections.abc import Iterator

from rlframework.config.sections import GenerationConfig, RunConfig
from rlframework.plugins.hookspec import DoctorCheck, DoctorFinding, hookimpl
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
        )
    ]


@hookimpl
def rlframework_weights_are_staged(generation: GenerationConfig) -> bool | None:
    """Return whether an engine copies weights on its GPU; several GPUs copy from shared memory of the host."""
    return _gpus(generation) == 1 if generation.name == "vllm" else None


@hookimpl
def rlframework_doctor_checks() -> list[DoctorCheck]:
    """Return the check that shows the engines' vLLM and their Python."""
    return [DoctorCheck("run", "generation engine", _engine_software)]


def _engine_software(config: RunConfig | None) -> Iterator[DoctorFinding]:
    if config is not None and config.generation.name == "vllm":
        yield DoctorFinding("ok", describe(config))


def _longest_row(config: GenerationConfig) -> int | None:
    return config.vllm.max_model_len if isinstance(config, VllmGenerationConfig) else None


def _gpus(config: GenerationConfig) -> int:
    return config.vllm.tensor_parallel_size if isinstance(config, VllmGenerationConfig) else 1
