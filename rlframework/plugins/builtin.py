"""The built-in plugins, registered through the same hooks as any other. Classes are named, but never imported."""

from __future__ import annotations

from rlframework.config.algorithms import GRPOConfig, OwnLossConfig, SFTConfig
from rlframework.config.base import Section
from rlframework.config.environments import AdditionConfig, DatasetConfig, Gsm8kConfig
from rlframework.config.sections import (
    GenerationConfig,
    RayGroupConfig,
    RemoteGroupConfig,
    RunConfig,
    WorkerGroupConfig,
)
from rlframework.errors import ConfigError
from rlframework.plugins.hookspec import hookimpl
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
from rlframework.plugins.user_defined import load_loss, load_reward


@hookimpl
def rlframework_data_processors() -> list[DataProcessorRecord]:
    """The built-in microbatch processor."""
    return [
        DataProcessorRecord(
            name="microbatches",
            target="rlframework.microbatches.data_processor:MicrobatchProcessor",
            api_version=API_VERSION,
            summary="padded, dynamic or packed microbatches",
        )
    ]


@hookimpl
def rlframework_worker_groups() -> list[WorkerGroupRecord]:
    """Workers in this process, in several processes on this machine, or in Ray actors."""
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
            summary="several worker processes on this machine, without Ray",
            capabilities=frozenset({Capability.DATA_PARALLEL}),
            config_model=RemoteGroupConfig,
        ),
        WorkerGroupRecord(
            name="ray",
            target="rlframework.workers.ray.remote_group:RayRemoteWorkerGroup",
            api_version=API_VERSION,
            summary="Ray actors on this machine or on a cluster",
            capabilities=frozenset({Capability.DATA_PARALLEL}),
            config_model=RayGroupConfig,
        ),
    ]


@hookimpl
def rlframework_generation_engines() -> list[GenerationEngineRecord]:
    """The built-in engine."""
    return [
        GenerationEngineRecord(
            name="transformers",
            target="rlframework.generation.transformers_engine:TransformersEngine",
            api_version=API_VERSION,
            summary="generation with transformers, in the trainer's process or in separate ones",
            capabilities=frozenset({Capability.COLLECTIVE_REFIT, Capability.IPC_REFIT}),
            config_model=GenerationConfig,
        )
    ]


@hookimpl
def rlframework_environments() -> list[EnvironmentRecord]:
    """Tasks with verifiable rewards."""
    return [
        EnvironmentRecord(
            name="addition",
            target="rlframework.environments.addition:AdditionEnvironment",
            api_version=API_VERSION,
            summary="sums of integers, generated from the seed",
            config_model=AdditionConfig,
        ),
        EnvironmentRecord(
            name="gsm8k",
            target="rlframework.environments.gsm8k:Gsm8kEnvironment",
            api_version=API_VERSION,
            summary="grade-school math problems (Cobbe et al. 2021), checked with math-verify",
            config_model=Gsm8kConfig,
        ),
        EnvironmentRecord(
            name="dataset",
            target="rlframework.environments.dataset:DatasetEnvironment",
            api_version=API_VERSION,
            summary="your own data: JSONL, Parquet or a Hugging Face dataset",
            config_model=DatasetConfig,
            check=check_dataset,
        ),
    ]


@hookimpl
def rlframework_algorithms() -> list[AlgorithmRecord]:
    """The built-in training loops."""
    return [
        AlgorithmRecord(
            name="sft",
            target="rlframework.algorithms.sft:SFT",
            api_version=API_VERSION,
            summary="supervised fine-tuning on the environment's completions",
            check=check_sft,
            config_model=SFTConfig,
        ),
        AlgorithmRecord(
            name="grpo",
            target="rlframework.algorithms.grpo:GRPO",
            api_version=API_VERSION,
            summary="group-relative policy optimization (Shao et al. 2024, arXiv:2402.03300)",
            check=check_grpo,
            config_model=GRPOConfig,
        ),
    ]


def check_inline(config: RunConfig, device: str) -> list[Problem]:
    """Reject more than one worker in the driver process."""
    workers = config.worker_group.num_workers
    if workers == 1:
        return []
    hint = "Set it to 1, or set worker_group.name to processes or ray."
    return [Problem("worker_group.num_workers", f"worker_group.name=inline supports one worker, not {workers}.", hint)]


def check_dataset(config: RunConfig, device: str) -> list[Problem]:
    """Reject algorithms that need rewards if the environment has no way to score completions."""
    environment, algorithm = config.environment, config.algorithm
    if not isinstance(environment, DatasetConfig):
        return []
    if environment.reward is not None:
        return _check_reward(environment.reward)
    if environment.scores_completions:
        return []
    hint = (
        "Set it to exact or math, with reference answers in the data (environment.columns.answer), or set "
        "environment.reward to your own function."
    )
    if isinstance(algorithm, GRPOConfig):
        return [Problem("environment.check", "completions are not scored, so GRPO has no rewards.", hint)]
    if isinstance(algorithm, SFTConfig) and algorithm.stop_at_accuracy is not None:
        message = "completions are not scored, so there is no accuracy for algorithm.stop_at_accuracy."
        return [Problem("environment.check", message, hint)]
    return []


def _check_reward(path: str) -> list[Problem]:
    """Reject a reward function that cannot be imported or called."""
    try:
        load_reward(path)
    except ConfigError as error:
        return [Problem("environment.reward", str(error))]
    return []


def check_sft(config: RunConfig, device: str) -> list[Problem]:
    """Check the import path of a user-defined loss."""
    return _check_loss(config.algorithm.loss) if isinstance(config.algorithm, SFTConfig) else []


def _check_loss(loss: Section | None) -> list[Problem]:
    """Reject a user-defined loss that cannot be constructed."""
    try:
        if isinstance(loss, OwnLossConfig):
            load_loss(loss.name, loss.keys)
    except ConfigError as error:
        return [Problem("algorithm.loss", str(error))]
    return []


def check_grpo(config: RunConfig, device: str) -> list[Problem]:
    """Check that a rollout divides into global batches, that sampling is not greedy, and the overlong buffer's size."""
    algorithm, batch_size = config.algorithm, config.policy.train_global_batch_size
    if not isinstance(algorithm, GRPOConfig):
        return []
    problems = _check_loss(algorithm.loss)
    rows = algorithm.prompts_per_step * algorithm.samples_per_prompt
    if rows % batch_size:
        message = (
            f"a step has {rows} rows (algorithm.prompts_per_step={algorithm.prompts_per_step} x "
            f"samples_per_prompt={algorithm.samples_per_prompt}), not a multiple of the global batch size {batch_size}."
        )
        hint = f"Set it to {rows} for one optimizer step per rollout, or to a divisor of {rows} for several."
        problems.append(Problem("policy.train_global_batch_size", message, hint))
    buffer, limit = algorithm.overlong.buffer, config.generation.max_new_tokens
    if buffer > limit:
        message = f"{buffer} exceeds generation.max_new_tokens, which is {limit}."
        hint = f"Set it to at most {limit}: the buffer is the end of a completion."
        problems.append(Problem("algorithm.overlong.buffer", message, hint))
    if config.generation.temperature == 0:
        message = "greedy completions of a prompt are all identical, so GRPO has nothing to compare."
        problems.append(Problem("generation.temperature", message, "Set it to a positive value, such as 1.0."))
    return problems
