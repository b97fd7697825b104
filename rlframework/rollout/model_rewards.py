"""Rewards of a reward model: the section `reward_model` of a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from rlframework.config.further_policies import RewardModelConfig
from rlframework.observers.timeline import ENVIRONMENT, Timeline, timed

if TYPE_CHECKING:
    from rlframework.policy.client import Policy
    from rlframework.rollout.result import Rollout


def add_model_rewards(result: Rollout, model: Policy, timeline: Timeline | None = None) -> None:
    """Make the scores of `model` part of the rewards of `result`, whose last row of each episode it scores.

    The reward becomes `environment_weight` times that of the environment plus `weight` times the score, at the end of
    the row. Failed episodes keep the reward 0. Adds the means of both, `environment_reward` and `model_score`, to the
    metrics, and the time of the scores to `timeline`.
    """
    section = model.config.policy
    assert isinstance(section, RewardModelConfig)
    last = torch.searchsorted(result.episode_of, torch.arange(len(result.samples)), right=True) - 1
    with timed(timeline, ENVIRONMENT, "reward model"):
        scores = model.score(result.data.select_indices(last))["scores"]
    model.rest()
    counted = ~result.failed
    combined = section.environment_weight * result.rewards + section.weight * scores
    result.metrics |= {
        "environment_reward": float(result.rewards[counted].mean()),
        "model_score": float(scores[counted].mean()),
        "reward": float(combined[counted].mean()),
    }
    result.rewards = combined * counted
