"""The rows of a training step and their tokens, before there are any."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlframework.algorithms.input_checks import evenly_spaced, longest
from rlframework.base.errors import ConfigError, DataError
from rlframework.config.sections import RunConfig
from rlframework.datasets.chat.rendering import render_prompt, render_samples
from rlframework.datasets.tokens import TokenData
from rlframework.huggingface.model_directories import model_positions
from rlframework.interfaces.environment import Sample, has_episodes, runs_agents
from rlframework.rollout.parts import Parts

RENDERED, LONGEST = 256, 16
"""Of the samples, this many are rendered at even distances, and the longest by characters."""


@dataclass(frozen=True)
class Rows:
    """The number of rows of a step, and the mean and maximum of their tokens if every answer reaches its limit.

    `generated`: the most tokens that a step generates, in at most `turns` turns of each episode. With several, an
    episode is taken for one row; what the environment or agent adds counts as far as `environment.max_episode_tokens`
    allows, without which it is unknown. `limit`: the most tokens of a row, 0 if nothing bounds them.
    """

    count: int
    mean: float
    longest: int
    generated: int = 0
    turns: int = 1
    limit: int = 0

    @property
    def trained(self) -> int:
        """Tokens of all rows of a step, including prompts; the most of them, if rows have several turns."""
        return self.count * self.limit if self.turns > 1 and self.limit else round(self.count * self.mean)


def rows_of(parts: Parts) -> Rows:
    """Estimate the rows of a step. An algorithm whose configuration has `prompts_per_step` generates its rows."""
    algorithm: Any = parts.config.algorithm
    count, generates = rows_per_step(parts.config)
    if generates:
        return _generated_rows(parts, count)
    if getattr(algorithm, "token_data", None) is not None:
        lengths = TokenData(algorithm.token_data).lengths.tolist()
    else:
        train_on: Any = getattr(algorithm, "train_on", "all")
        cut: Any = getattr(algorithm, "max_tokens", None)
        rows = render_samples(parts.tokenizer, _selected(parts), train_on, cut, parts.images)
        lengths = [len(ids) for ids, _ in rows]
    return Rows(count, sum(lengths) / len(lengths), max(lengths))


def _generated_rows(parts: Parts, count: int) -> Rows:
    policy, environment = parts.config.policy, parts.config.environment
    several = has_episodes(parts.environment) or runs_agents(parts.environment)
    turns, budget = (environment.max_turns, environment.max_episode_tokens) if several else (1, None)
    limits = (model_positions(policy.model_name, policy.trust_remote_code), budget)
    limit = min((each for each in limits if each), default=0)
    answers = turns * parts.config.generation.max_new_tokens
    prompts = [len(render_prompt(parts.tokenizer, each.messages, images=parts.images)) for each in _selected(parts)]
    lengths = [min(budget or prompt + answers, limit or prompt + answers) for prompt in prompts]
    generated = max(min(answers, length - prompt) for prompt, length in zip(prompts, lengths, strict=True))
    return Rows(count, sum(lengths) / len(lengths), max(lengths), count * max(generated, 1), turns, limit)


def assumed_rows(config: RunConfig) -> Rows:
    """The rows of a step where no tokenizer is at hand: each as long as the largest microbatch, or an answer.

    An answer that no microbatch has room for is a `ConfigError`, as it is where prompts are at hand.
    """
    count, generates = rows_per_step(config)
    policy = config.policy
    batching = policy.batching
    length = batching.tokens or GPU_TOKENS
    if generates:
        answer = config.generation.max_new_tokens
        limits = model_positions(policy.model_name, policy.trust_remote_code), config.environment.max_episode_tokens
        length = min(answer, *(limit for limit in limits if limit is not None))
        if batching.limited != "rows" and batching.tokens is not None and length > batching.tokens:
            raise ConfigError(
                f"with generation.max_new_tokens={answer} a row may have {length} tokens or more, but "
                f"policy.batching.tokens={batching.tokens} is the most that a dynamic or packed microbatch may have: "
                "set it to the most tokens of prompt and answer, remove the key, or lower generation.max_new_tokens"
            )
    return Rows(count, float(length), length, count * length if generates else 0)


def rows_per_step(config: RunConfig) -> tuple[int, bool]:
    """The rows of a step, and whether it generates them."""
    algorithm: Any = config.algorithm
    if (prompts := getattr(algorithm, "prompts_per_step", None)) is None:
        return config.policy.train_global_batch_size, False
    return prompts * getattr(algorithm, "samples_per_prompt", 1), True


def optimizer_steps(config: RunConfig) -> int:
    """The optimizer steps of a step: those of a pass over its rows, for each pass."""
    passes: int = getattr(config.algorithm, "epochs_per_batch", 1)
    return passes * rows_per_step(config)[0] // config.policy.train_global_batch_size


CPU_TOKENS, GPU_TOKENS = 1024, 8192
"""Tokens of a microbatch where `policy.batching.tokens` leaves them to the backend: those of dtensor."""


def microbatch_tokens(config: RunConfig, rows: Rows, device: str) -> int:
    """Tokens of the largest microbatch; assumes the reference backend's size if it is left to the backend."""
    policy, workers = config.policy, config.worker_group.num_workers // config.policy.parallelism.model_size
    rows_per_worker = -(-policy.train_global_batch_size // max(1, workers))
    if policy.batching.limited == "rows":
        return min(policy.train_micro_batch_size, rows_per_worker) * rows.longest
    most = max(policy.batching.tokens or (CPU_TOKENS if device == "cpu" else GPU_TOKENS), rows.longest)
    return min(most, round(rows_per_worker * max(rows.mean, 1.0)) + rows.longest)


def _selected(parts: Parts) -> list[Sample]:
    samples = parts.environment.samples("train")
    if not len(samples):
        raise DataError("the environment has no train samples")
    return evenly_spaced(samples, RENDERED) + (longest(samples, LONGEST) if len(samples) > RENDERED else [])
