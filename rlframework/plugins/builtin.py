"""Core's own parts, registered through the same hooks as everybody else's. Classes are named, never imported, here."""

from __future__ import annotations

from rlframework.config.algorithms import GRPOConfig, SFTConfig
from rlframework.config.environments import AdditionConfig, Gsm8kConfig
from rlframework.config.sections import GenerationConfig, WorkerGroupConfig
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import (
    API_VERSION,
    AlgorithmRecord,
    DataProcessorRecord,
    EnvironmentRecord,
    GenerationEngineRecord,
    WorkerGroupRecord,
)


@hookimpl
def rlframework_data_processors() -> list[DataProcessorRecord]:
    """Core's microbatches."""
    return [
        DataProcessorRecord(
            name="microbatches",
            target="rlframework.data.microbatches:MicrobatchProcessor",
            api_version=API_VERSION,
            summary="global batches into padded, dynamic or packed microbatches",
        )
    ]


@hookimpl
def rlframework_worker_groups() -> list[WorkerGroupRecord]:
    """One process, or Ray actors."""
    return [
        WorkerGroupRecord(
            name="inline",
            target="rlframework.distributed.inline:InlineWorkerGroup",
            api_version=API_VERSION,
            summary="one worker in this process",
            config_model=WorkerGroupConfig,
        ),
        WorkerGroupRecord(
            name="ray",
            target="rlframework.distributed.ray_group:RayWorkerGroup",
            api_version=API_VERSION,
            summary="N worker processes on this machine, by Ray",
            config_model=WorkerGroupConfig,
        ),
    ]


@hookimpl
def rlframework_generation_engines() -> list[GenerationEngineRecord]:
    """The embedded engine."""
    return [
        GenerationEngineRecord(
            name="transformers",
            target="rlframework.generation.transformers_engine:TransformersEngine",
            api_version=API_VERSION,
            summary="generation with the trainer's own model, in its process",
            config_model=GenerationConfig,
        )
    ]


@hookimpl
def rlframework_environments() -> list[EnvironmentRecord]:
    """Verifiable tasks."""
    return [
        EnvironmentRecord(
            name="addition",
            target="rlframework.environments.addition:AdditionEnvironment",
            api_version=API_VERSION,
            summary="sums of two numbers, made up on the fly",
            config_model=AdditionConfig,
        ),
        EnvironmentRecord(
            name="gsm8k",
            target="rlframework.environments.gsm8k:Gsm8kEnvironment",
            api_version=API_VERSION,
            summary="grade-school word problems (Cobbe et al. 2021), answers checked with math-verify",
            config_model=Gsm8kConfig,
        ),
    ]


@hookimpl
def rlframework_algorithms() -> list[AlgorithmRecord]:
    """Training loops."""
    return [
        AlgorithmRecord(
            name="sft",
            target="rlframework.algorithms.sft:SFT",
            api_version=API_VERSION,
            summary="supervised training on the environment's own answers",
            config_model=SFTConfig,
        ),
        AlgorithmRecord(
            name="grpo",
            target="rlframework.algorithms.grpo:GRPO",
            api_version=API_VERSION,
            summary="group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)",
            config_model=GRPOConfig,
        ),
    ]
