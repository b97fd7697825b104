"""The built-in plugins, registered through the same hooks as any other. Classes are named, but never imported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from rlframework.base.errors import ConfigError
from rlframework.config.algorithms import GRPOConfig, OwnLossConfig, PPOConfig, SFTConfig
from rlframework.config.base import Section
from rlframework.config.distillation_algorithms import DistillationConfig
from rlframework.config.environments import (
    AdditionConfig,
    DatasetConfig,
    Gsm8kConfig,
    ToolsConfig,
)
from rlframework.config.sections import (
    RemoteGroupConfig,
    RunConfig,
    WorkerGroupConfig,
)
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import (
    AlgorithmRecord,
    Capability,
    DataProcessorRecord,
    EnvironmentRecord,
    Problem,
    Record,
    WorkerGroupRecord,
)

_Kind = TypeVar("_Kind", bound=Record)


@hookimpl
def rlframework_data_processors() -> list[DataProcessorRecord]:
    """The built-in microbatch processor."""
    target, summary = "policy.microbatches.data_processor:MicrobatchProcessor", "padded, dynamic or packed microbatches"
    return [_core(DataProcessorRecord, "microbatches", target, summary)]


@hookimpl
def rlframework_worker_groups() -> list[WorkerGroupRecord]:
    """Workers in this process, or in several processes on this machine."""
    core, several = partial(_core, WorkerGroupRecord), frozenset({Capability.DATA_PARALLEL})
    inline, local = "one worker in this process", "several worker processes on this machine, without Ray"
    return [
        core("inline", "workers.dispatch:InlineWorkerGroup", inline, WorkerGroupConfig, check=check_inline),
        core("processes", "workers.processes:ProcessWorkerGroup", local, RemoteGroupConfig, capabilities=several),
    ]


@hookimpl
def rlframework_environments() -> list[EnvironmentRecord]:
    """Tasks with verifiable rewards."""
    core, sums = partial(_core, EnvironmentRecord), "sums of integers, generated from the seed"
    math = "grade-school math problems (Cobbe et al. 2021), checked with math-verify"
    own = "your own data: JSONL, Parquet or a Hugging Face dataset"
    return [
        core("addition", "environments.addition:AdditionEnvironment", sums, AdditionConfig),
        core("gsm8k", "environments.gsm8k:Gsm8kEnvironment", math, Gsm8kConfig),
        core("dataset", "environments.dataset:DatasetEnvironment", own, DatasetConfig, check=check_dataset),
        core(
            "tools",
            "environments.tool_environment:ToolEnvironment",
            "the methods of a class of yours as tools, with rows of your data as tasks",
            ToolsConfig,
            check=check_tools,
            capabilities=frozenset({Capability.EPISODES}),
        ),
    ]


@hookimpl
def rlframework_algorithms() -> list[AlgorithmRecord]:
    """The built-in training loops."""
    core, sft = partial(_core, AlgorithmRecord), "supervised fine-tuning on the environment's completions"
    distillation = "distillation of a teacher, on-policy or from data (Agarwal et al. 2023, arXiv:2306.13649)"
    ppo = "proximal policy optimization with a critic (Schulman et al. 2017, arXiv:1707.06347)"
    return [
        core("sft", "algorithms.sft:SFT", sft, SFTConfig, check=check_sft),
        *(
            core(name, "algorithms.grpo:GRPO", summary, GRPOConfig, check=check_grpo)
            for name, summary in POLICY_GRADIENT.items()
        ),
        core("ppo", "algorithms.ppo:PPO", ppo, PPOConfig, check=check_grpo),
        core(
            "distillation",
            "algorithms.distillation:Distillation",
            distillation,
            DistillationConfig,
            check=check_distillation,
        ),
    ]


POLICY_GRADIENT = {
    "grpo": "group-relative policy optimization (Shao et al. 2024, arXiv:2402.03300)",
    "dr_grpo": "GRPO without its biases by length and deviation (Liu et al. 2025, arXiv:2503.20783)",
    "dapo": "GRPO with clip-higher, token means and dynamic sampling (Yu et al. 2025, arXiv:2503.14476)",
    "gspo": "GRPO with the ratio of sequences (Zheng et al. 2025, arXiv:2507.18071)",
    "cispo": "clipped importance weights of log-probabilities (MiniMax 2025, arXiv:2506.13585)",
    "rloo": "REINFORCE with a leave-one-out baseline (Ahmadian et al. 2024, arXiv:2402.14740)",
    "reinforce_plus_plus": "REINFORCE with advantages normalized over the batch (Hu et al. 2025, arXiv:2501.03262)",
    "reinforce_plus_plus_baseline": "the same with the mean of the group as the baseline",
}
"""Algorithms that are settings of one, see `config.algorithm_presets`, with their summaries."""


def _core(
    kind: type[_Kind], name: str, target: str, summary: str, model: type[Section] | None = None, **fields: Any
) -> _Kind:
    return kind(name, f"rlframework.{target}", kind.supported_api, summary, config_model=model, **fields)


def check_inline(config: RunConfig, device: str) -> list[Problem]:
    """Reject more than one worker in the driver process."""
    key, workers = "worker_group.num_workers", config.worker_group.num_workers
    hint = "Set it to 1, or set worker_group.name to processes or ray."
    problem = Problem(key, f"worker_group.name=inline supports one worker, not {workers}.", hint)
    return [problem] if workers > 1 else []


def check_dataset(config: RunConfig, device: str) -> list[Problem]:
    """Reject an unusable reward function, and algorithms that need rewards if nothing scores the completions."""
    environment, algorithm = config.environment, config.algorithm
    if not isinstance(environment, DatasetConfig):
        return []
    if environment.reward is not None:
        from rlframework.plugins.user_defined import load_reward

        paths = environment.reward_functions.items()
        return [problem for key, path in paths for problem in problem_of(key, load_reward, path)]
    if environment.scores_completions:
        return []
    if isinstance(algorithm, GRPOConfig):
        missing = "GRPO has no rewards"
    elif isinstance(algorithm, SFTConfig) and algorithm.stop_at_accuracy is not None:
        missing = "there is no accuracy for algorithm.stop_at_accuracy"
    else:
        return []
    hint = (
        "Set it to exact or math, with reference answers in the data (environment.columns.answer), or set "
        "environment.reward to your own function."
    )
    if isinstance(algorithm, GRPOConfig) and config.reward_model is not None:
        hint += (
            " With the section reward_model the environment still scores answers, for the accuracy: where it cannot, "
            "set environment.reward to a function that returns 0.0, and reward_model.environment_weight to 0."
        )
    return [Problem("environment.check", f"completions are not scored, so {missing}.", hint)]


def check_tools(config: RunConfig, device: str) -> list[Problem]:
    """Check the reward functions as `check_dataset` does; the class itself is checked when it is loaded."""
    environment = config.environment
    return check_dataset(config, device) if getattr(environment, "reward", None) is not None else []


def check_sft(config: RunConfig, device: str) -> list[Problem]:
    """Reject a user-defined loss that cannot be constructed."""
    loss = getattr(config.algorithm, "loss", None)
    if not isinstance(loss, OwnLossConfig):
        return []
    from rlframework.plugins.user_defined import load_loss

    return problem_of("algorithm.loss", load_loss, loss.name, loss.keys)


def check_grpo(config: RunConfig, device: str) -> list[Problem]:
    """Check the loss as `check_sft` does, the divisions of a rollout, the sampling and the overlong buffer."""
    algorithm = config.algorithm
    if not isinstance(algorithm, GRPOConfig):
        return []
    problems = check_sft(config, device)
    if algorithm.advantage is not None:
        from rlframework.plugins.user_defined import load_advantage

        problems += problem_of("algorithm.advantage", load_advantage, algorithm.advantage)
    rows = algorithm.prompts_per_step * algorithm.samples_per_prompt
    trained = {"policy": config.policy} | ({} if config.critic is None else {"critic": config.critic})
    for name, batch_size in ((name, section.train_global_batch_size) for name, section in trained.items()):
        if rows % batch_size:
            message = (
                f"a step has {rows} rows (algorithm.prompts_per_step={algorithm.prompts_per_step} x samples_per_prompt="
                f"{algorithm.samples_per_prompt}), not a multiple of the global batch size {batch_size}."
            )
            hint = f"Set it to {rows} for one optimizer step per rollout, or to a divisor of {rows} for several."
            problems.append(Problem(f"{name}.train_global_batch_size", message, hint))
    buffer, limit = algorithm.overlong.buffer, config.generation.max_new_tokens
    if buffer > limit:
        message = f"{buffer} exceeds generation.max_new_tokens, which is {limit}."
        hint = f"Set it to at most {limit}: the buffer is the end of a completion."
        problems.append(Problem("algorithm.overlong.buffer", message, hint))
    if config.generation.temperature == 0:
        message = "greedy completions of a prompt are all identical, so GRPO has nothing to compare."
        problems.append(Problem("generation.temperature", message, "Set it to a positive value, such as 1.0."))
    return problems + check_sampling(config, device)


def check_distillation(config: RunConfig, device: str) -> list[Problem]:
    """Reject truncated and greedy sampling for the policy gradient of sampled tokens."""
    if not isinstance(config.algorithm, DistillationConfig) or config.algorithm.tokens != "sampled":
        return []
    problems = check_sampling(config, device)
    if config.generation.temperature == 0:
        message = "greedy completions are not samples, from which algorithm.tokens=sampled estimates the divergence."
        problems.append(Problem("generation.temperature", message, "Set it to a positive value, such as 1.0."))
    return problems


def check_sampling(config: RunConfig, device: str) -> list[Problem]:
    """Reject top-k and top-p, for algorithms that train on rollouts: log-probabilities are those before truncation."""
    generation = config.generation
    truncations = (("top_k", generation.top_k, None), ("top_p", generation.top_p, 1.0))
    return [
        Problem(
            f"generation.{key}",
            f"{value} samples from a truncated distribution, but log-probabilities are those of the whole one: ratios "
            f"and gradients of {config.algorithm.name} would be biased by the probability that the truncation removes.",
            f"Set it to {'null' if off is None else off}, and generation.temperature below 1 for likelier tokens. "
            "`rlframework evaluate` and `generate` do accept it.",
        )
        for key, value, off in truncations
        if value != off
    ]


def problem_of(key: str, load: Callable[..., object], *arguments: object) -> list[Problem]:
    """Return the `ConfigError` that `load(*arguments)` raises as the problem of `key`, if it raises one."""
    try:
        load(*arguments)
    except ConfigError as error:
        return [Problem(key, str(error))]
    return []
