"""The built-in plugins, registered through the same hooks as any other. Classes are named, but never imported."""

from __future__ import annotations

from collections.abc import Callable

from rlframework.config.algorithms import GRPOConfig, OwnLossConfig, SFTConfig
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
    target = "rlframework.microbatches.data_processor:MicrobatchProcessor"
    return [DataProcessorRecord("microbatches", target, API_VERSION, "padded, dynamic or packed microbatches")]


@hookimpl
def rlframework_worker_groups() -> list[WorkerGroupRecord]:
    """Workers in this process, in several processes on this machine, or in Ray actors."""
    return [
        WorkerGroupRecord(
            "inline",
            "rlframework.workers.inline:InlineWorkerGroup",
            API_VERSION,
            "one worker in this process",
            config_model=WorkerGroupConfig,
            check=check_inline,
        ),
        WorkerGroupRecord(
            "processes",
            "rlframework.workers.processes:ProcessWorkerGroup",
            API_VERSION,
            "several worker processes on this machine, without Ray",
            frozenset({Capability.DATA_PARALLEL}),
            RemoteGroupConfig,
        ),
        WorkerGroupRecord(
            "ray",
            "rlframework.workers.ray.configured_group:ConfiguredRayWorkerGroup",
            API_VERSION,
            "Ray actors on this machine or on a cluster",
            frozenset({Capability.DATA_PARALLEL}),
            RayGroupConfig,
        ),
    ]


@hookimpl
def rlframework_generation_engines() -> list[GenerationEngineRecord]:
    """The built-in engine."""
    target = "rlframework.generation.transformers_engine:TransformersEngine"
    summary = "generation with transformers, in the trainer's process or in separate ones"
    refits = frozenset({Capability.COLLECTIVE_REFIT, Capability.IPC_REFIT})
    return [GenerationEngineRecord("transformers", target, API_VERSION, summary, refits, GenerationConfig)]


@hookimpl
def rlframework_environments() -> list[EnvironmentRecord]:
    """Tasks with verifiable rewards."""
    return [
        EnvironmentRecord(
            "addition",
            "rlframework.environments.addition:AdditionEnvironment",
            API_VERSION,
            "sums of integers, generated from the seed",
            config_model=AdditionConfig,
        ),
        EnvironmentRecord(
            "gsm8k",
            "rlframework.environments.gsm8k:Gsm8kEnvironment",
            API_VERSION,
            "grade-school math problems (Cobbe et al. 2021), checked with math-verify",
            config_model=Gsm8kConfig,
        ),
        EnvironmentRecord(
            "dataset",
            "rlframework.environments.dataset:DatasetEnvironment",
            API_VERSION,
            "your own data: JSONL, Parquet or a Hugging Face dataset",
            config_model=DatasetConfig,
            check=check_dataset,
        ),
    ]


@hookimpl
def rlframework_algorithms() -> list[AlgorithmRecord]:
    """The built-in training loops."""
    return [
        AlgorithmRecord(
            "sft",
            "rlframework.algorithms.sft:SFT",
            API_VERSION,
            "supervised fine-tuning on the environment's completions",
            config_model=SFTConfig,
            check=check_sft,
        ),
        AlgorithmRecord(
            "grpo",
            "rlframework.algorithms.grpo:GRPO",
            API_VERSION,
            "group-relative policy optimization (Shao et al. 2024, arXiv:2402.03300)",
            config_model=GRPOConfig,
            check=check_grpo,
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
    """Reject an unusable reward function, and algorithms that need rewards if nothing scores the completions."""
    environment, algorithm = config.environment, config.algorithm
    if not isinstance(environment, DatasetConfig):
        return []
    if environment.reward is not None:
        return _problem_of("environment.reward", load_reward, environment.reward)
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


def check_sft(config: RunConfig, device: str) -> list[Problem]:
    """Reject a user-defined loss that cannot be constructed."""
    loss = getattr(config.algorithm, "loss", None)
    if not isinstance(loss, OwnLossConfig):
        return []
    return _problem_of("algorithm.loss", load_loss, loss.name, loss.keys)


def check_grpo(config: RunConfig, device: str) -> list[Problem]:
    """Check the loss as `check_sft` does, the divisions of a rollout, the sampling and the overlong buffer."""
    algorithm, batch_size = config.algorithm, config.policy.train_global_batch_size
    if not isinstance(algorithm, GRPOConfig):
        return []
    problems = check_sft(config, device)
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


def _problem_of(key: str, load: Callable[..., object], *arguments: object) -> list[Problem]:
    try:
        load(*arguments)
    except ConfigError as error:
        return [Problem(key, str(error))]
    return []
