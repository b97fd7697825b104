"""The rollouts of training steps: synchronous, or in the background of training (`algorithm.async`)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.base.errors import DataError
from rlframework.config.further_policies import RewardModelConfig
from rlframework.datasets.curriculum import Curriculum
from rlframework.datasets.loader import PromptLoader
from rlframework.interfaces.environment import Sample, has_episodes, runs_agents
from rlframework.observers.timeline import ENVIRONMENT, Timeline, timed
from rlframework.rollout.group_players import GroupPlayer, SingleTurnPlayer
from rlframework.rollout.result import Rollout
from rlframework.rollout.seeds import row_seeds

if TYPE_CHECKING:
    from rlframework.policy.client import Policy
    from rlframework.rollout.parts import Parts


def group_player(parts: Parts) -> GroupPlayer[Any]:
    """Return the player of the run's environment: of its agents, its episodes, or single turns that it scores."""
    if runs_agents(parts.environment):
        from rlframework.rollout.episodes import AgentsPlayer

        return AgentsPlayer(parts)
    if has_episodes(parts.environment):
        from rlframework.rollout.episodes import EpisodesPlayer

        return EpisodesPlayer(parts)
    return SingleTurnPlayer(parts)


def rollout(parts: Parts, samples: Sequence[Sample], seeds: Tensor, *, temperature: float | None = None) -> Rollout:
    """Return an episode of each of `samples`, with `seeds [E]` int64, as the environment has them: see `Rollout`.

    `temperature`: of sampling, 0 to decode greedily; None: `generation.temperature`. Rewards are those of the
    environment, and of the run's reward model if it has one.
    """
    result = group_player(parts).play_all(samples, seeds, temperature=temperature)
    add_rewards_of_models(parts, result)
    return result


def add_rewards_of_models(parts: Parts, result: Rollout) -> None:
    """Make the scores of the run's reward model, if it has one, part of the rewards of `result`."""
    if (model := parts.models.get("reward_model")) is not None:
        add_model_rewards(result, model, parts.timeline)


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


class StepRollouts(ABC):
    """Rollouts of `groups` samples for each step, `rows` of each. The methods are called in the driver's thread."""

    def __init__(self, parts: Parts, groups: int, rows: int, max_staleness: int = 0) -> None:
        self._parts, self._groups, self._rows = parts, groups, rows
        self._samples = parts.environment.samples("train")
        numbers, mixture = range(len(self._samples)), getattr(self._samples, "mixture", ())
        loader: PromptLoader[int] = PromptLoader(numbers, 1, parts.config.seed, mixture)
        section = getattr(parts.config.algorithm, "curriculum", None)
        self._prompts = Curriculum(loader, len(self._samples), section, delay=1 + max_staleness)
        if section is not None and section.measured is not None and parts.checkpoint is None:
            self._prompts.start_from(section.measured, self._samples)

    def _success(self, numbers: Sequence[int], result: Rollout) -> list[tuple[int, float]]:
        """Return the number of each prompt of `result` with the mean accuracy of its episodes that have not failed."""
        accuracies, kept = result.accuracies.view(-1, self._rows), ~result.failed.view(-1, self._rows)
        means = (accuracies * kept).sum(1) / kept.sum(1)
        return [(number, mean) for number, mean in zip(numbers, means.tolist(), strict=True) if not isnan(mean)]

    @abstractmethod
    def publish(self, step: int) -> None:
        """Give the engines the weights after training step `step`."""

    @abstractmethod
    def rollout(self, step: int, number: int) -> Rollout:
        """Return rollout number 0, 1, ... of `step`, after `publish(step - 1)`."""

    @abstractmethod
    def take(self, step: int) -> dict[str, float]:
        """Note that `step` is trained on the rollouts that were returned for it; return its metrics."""

    def pop_metrics(self) -> dict[str, float]:
        """Return the metrics of the position in the data, as `PromptLoader.pop_metrics`."""
        return self._prompts.pop_metrics()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data, as JSON values."""
        return self._prompts.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._prompts.load_state_dict(state)

    def finish(self) -> None:
        """Let the driver use the engines and the environment: nothing is generated until the next `rollout`."""

    def close(self) -> None:
        """End everything that was started."""


class SynchronousRollouts(StepRollouts):
    """Generates in the driver's thread, when a step begins."""

    def publish(self, step: int) -> None:
        """See `StepRollouts.publish`."""
        self._parts.generation.prepare_for_generation()

    def rollout(self, step: int, number: int) -> Rollout:
        """See `StepRollouts.rollout`."""
        numbers = [self._prompts.draw(step) for _ in range(self._groups)]
        samples = [sample for row in numbers for sample in [self._samples[row]] * self._rows]
        first = number * len(samples)
        seeds = row_seeds(self._parts.config.seed, step, first + len(samples))[first:]
        result = rollout(self._parts, samples, seeds)
        self._prompts.note(step, self._success(numbers, result))
        return result

    def take(self, step: int) -> dict[str, float]:
        """See `StepRollouts.take`."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `StepRollouts.load_state_dict`. Raises `DataError` for the state of an asynchronous run."""
        if "ledger" in state:
            raise DataError(
                "the checkpoint is of an asynchronous run, which has drawn prompts for later steps; resume it with "
                "algorithm.async (with max_staleness: 0, generation waits for training)"
            )
        super().load_state_dict(state)
