"""Rollouts of a run's environment, of single turns or of episodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from rlframework.interfaces.environment import Sample, has_episodes, runs_agents
from rlframework.rollout.result import Rollout
from rlframework.rollout.single_turn import single_turns

if TYPE_CHECKING:
    from rlframework.rollout.parts import Parts


def rollout(parts: Parts, samples: Sequence[Sample], seeds: Tensor, *, temperature: float | None = None) -> Rollout:
    """Return an episode of each of `samples`, with `seeds [E]` int64, as the environment has them: see `Rollout`.

    `temperature`: of sampling, 0 to decode greedily; None: `generation.temperature`. Rewards are those of the
    environment, and of the run's reward model if it has one.
    """
    play = single_turns
    if runs_agents(parts.environment):
        from rlframework.rollout.agents import play_agents as play
    elif has_episodes(parts.environment):
        from rlframework.rollout.episodes import play_episodes as play
    result = play(parts, samples, seeds, temperature=temperature)
    add_rewards_of_models(parts, result)
    return result


def add_rewards_of_models(parts: Parts, result: Rollout) -> None:
    """Make the scores of the run's reward model, if it has one, part of the rewards of `result`."""
    if (model := parts.models.get("reward_model")) is not None:
        from rlframework.rollout.model_rewards import add_model_rewards

        add_model_rewards(result, model, parts.timeline)
