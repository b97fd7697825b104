"""Core's own parts, registered through the same hooks as everybody else's. Classes are named, never imported, here."""

from __future__ import annotations

from rlframework.config.algorithms import GRPOConfig, OwnLossConfig, SFTConfig
from rlframework.config.base import Section
from rlframework.config.environments import AdditionConfig, DatasetConfig, Gsm8kConfig
from rlframework.config.sections import (
    GenerationConfig,
    HostedGroupConfig,
    RayGroupConfig,
    RunConfig,
    WorkerGroupConfig,
)
from rlframework.errors import ConfigError
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.own_parts import load_loss, load_reward
from rlframework.plugins.types import (
    API_VERSION,
    AlgorithmRecord,
    Capability,
    DataProcessorRecord,
    EnvironmentRecord,
    GenerationEngineRecord,
    Problem,
    WorkerGroupRecord,
)


@hookimpl
def rlframework_data_processors() -> list[DataProcessorRecord]:
    """Core's microbatches."""
    return [
        DataProcessorRecord(
            name="microbatches",
            target="rlframework.microbatches.data_processor:MicrobatchProcessor",
            api_version=API_VERSION,
            summary="global batches into padded, dynamic or packed microbatches",
        )
    ]


@hookimpl
def rlframework_worker_groups() -> list[WorkerGroupRecord]:
    """One process, several of this machine, or Ray actors."""
    return [
        WorkerGroupRecord(
            name="inline",
            target="rlframework.workers.inline:InlineWorkerGroup",
            api_version=API_VERSION,
            summary="one worker in this process",
            config_model=WorkerGroupConfig,
            check=check_inline,
        ),
        WorkerGroupRecord(
            name="processes",
            target="rlframework.workers.processes:ProcessWorkerGroup",
            api_version=API_VERSION,
            summary="N worker processes on this machine, without Ray",
            capabilities=frozenset({Capability.DATA_PARALLEL}),
            config_model=HostedGroupConfig,
        ),
        WorkerGroupRecord(
            name="ray",
            target="rlframework.workers.ray.hosted_group:RayHostedGroup",
            api_version=API_VERSION,
            summary="N worker processes on this machine or on those of a cluster, by Ray",
            capabilities=frozenset({Capability.DATA_PARALLEL}),
            config_model=RayGroupConfig,
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
            summary="generation with the trainer's own model, in its process or in others",
            capabilities=frozenset({Capability.COLLECTIVE_REFIT, Capability.IPC_REFIT}),
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
        EnvironmentRecord(
            name="dataset",
            target="rlframework.environments.dataset:DatasetEnvironment",
            api_version=API_VERSION,
            summary="your own data: JSONL, Parquet, a Hugging Face data set",
            config_model=DatasetConfig,
            check=check_dataset,
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
            check=check_sft,
            config_model=SFTConfig,
        ),
        AlgorithmRecord(
            name="grpo",
            target="rlframework.algorithms.grpo:GRPO",
            api_version=API_VERSION,
            summary="group-relative policy optimisation (Shao et al. 2024, arXiv:2402.03300)",
            check=check_grpo,
            config_model=GRPOConfig,
        ),
    ]


def check_inline(config: RunConfig, device: str) -> list[Problem]:
    """One process has one worker."""
    workers = config.worker_group.num_workers
    if workers == 1:
        return []
    hint = "Set it to 1, or take worker_group.name=processes or ray."
    return [Problem("worker_group.num_workers", f"worker_group.name=inline runs one worker, not {workers}.", hint)]


def check_dataset(config: RunConfig, device: str) -> list[Problem]:
    """What needs rewards needs a way to judge answers."""
    environment, algorithm = config.environment, config.algorithm
    if not isinstance(environment, DatasetConfig):
        return []
    if environment.reward is not None:
        return _check_reward(environment.reward)
    if environment.judges:
        return []
    hint = (
        "Set it to exact or math; the data must have the right answers (environment.columns.answer). Or give a "
        "function of your own (environment.reward)."
    )
    if isinstance(algorithm, GRPOConfig):
        return [Problem("environment.check", "answers are not judged, so GRPO has no rewards.", hint)]
    if isinstance(algorithm, SFTConfig) and algorithm.stop_at_accuracy is not None:
        message = "answers are not judged, so there is no accuracy for algorithm.stop_at_accuracy."
        return [Problem("environment.check", message, hint)]
    return []


def _check_reward(path: str) -> list[Problem]:
    """The function is there, and can be called."""
    try:
        load_reward(path)
    except ConfigError as error:
        return [Problem("environment.reward", str(error))]
    return []


def check_sft(config: RunConfig, device: str) -> list[Problem]:
    """A loss of the user's own is there."""
    return _check_loss(config.algorithm.loss) if isinstance(config.algorithm, SFTConfig) else []


def _check_loss(loss: Section | None) -> list[Problem]:
    """A loss of the user's own can be made."""
    try:
        if isinstance(loss, OwnLossConfig):
            load_loss(loss.name, loss.keys)
    except ConfigError as error:
        return [Problem("algorithm.loss", str(error))]
    return []


def check_grpo(config: RunConfig, device: str) -> list[Problem]:
    """A rollout batch is a whole number of global batches, samples differ, and the overlong part is one of answers."""
    algorithm, batch_size = config.algorithm, config.policy.train_global_batch_size
    if not isinstance(algorithm, GRPOConfig):
        return []
    problems = _check_loss(algorithm.loss)
    rows = algorithm.prompts_per_step * algorithm.samples_per_prompt
    if rows % batch_size:
        message = (
            f"a step has {rows} rows (algorithm.prompts_per_step {algorithm.prompts_per_step} x samples_per_prompt "
            f"{algorithm.samples_per_prompt}), which do not divide into global batches of {batch_size}."
        )
        hint = f"Set it to {rows} for one optimizer step a batch, or to a divisor of that."
        problems.append(Problem("policy.train_global_batch_size", message, hint))
    buffer, limit = algorithm.overlong.buffer, config.generation.max_new_tokens
    if buffer > limit:
        message = f"{buffer} is more than generation.max_new_tokens, which is {limit}."
        hint = f"Set it to {limit} or less: it is the last part of an answer."
        problems.append(Problem("algorithm.overlong.buffer", message, hint))
    if config.generation.temperature == 0:
        message = "greedy samples of one prompt are all alike, so GRPO has nothing to compare."
        problems.append(Problem("generation.temperature", message, "Set it above 0, such as 1.0."))
    return problems
