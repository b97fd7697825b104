"""Rollouts of a run's environment, of single turns or of episodes, and validation with them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from rlframework.environments.agent import runs_agents
from rlframework.interfaces.environment import Sample, has_episodes
from rlframework.plugins.hookspec import SampleRecord
from rlframework.rollout.endpoint.agents import play_agents
from rlframework.rollout.episodes import play_episodes
from rlframework.rollout.model_rewards import add_model_rewards
from rlframework.rollout.result import Rollout
from rlframework.rollout.seeds import row_seeds
from rlframework.rollout.single_turn import single_turns

if TYPE_CHECKING:
    from rlframework.algorithm import Parts


def rollout(parts: Parts, samples: Sequence[Sample], seeds: Tensor, *, greedy: bool = False) -> Rollout:
    """Return an episode of each of `samples`, with `seeds [E]` int64, as the environment has them: see `Rollout`.

    Rewards are those of the environment, and of the run's reward model if it has one.
    """
    play = single_turns
    if runs_agents(parts.environment):
        play = play_agents
    elif has_episodes(parts.environment):
        play = play_episodes
    result = play(parts, samples, seeds, greedy=greedy)
    add_rewards_of_models(parts, result)
    return result


def add_rewards_of_models(parts: Parts, result: Rollout) -> None:
    """Make the scores of the run's reward model, if it has one, part of the rewards of `result`."""
    if (model := parts.models.get("reward_model")) is not None:
        add_model_rewards(result, model, parts.timeline)


def validate(parts: Parts, step: int) -> tuple[dict[str, float], list[SampleRecord]]:
    """Score greedy answers to the first held-out samples; return metrics and some of the samples for logging.

    Episodes have the same seeds at each step, so that steps can be compared.
    """
    count = parts.config.algorithm.validation.samples
    samples = parts.environment.samples("validation")[:count]
    result = rollout(parts, samples, row_seeds(parts.config.seed, 0, len(samples)), greedy=True)
    metrics = {f"validation/{name}": value for name, value in result.metrics.items()}
    metrics["validation/samples"] = float(len(samples))
    return metrics, result.records(step, "validation", parts.config.observers.samples, parts.tokenizer)
