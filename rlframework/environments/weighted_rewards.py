"""Several rewards with weights: `environment.reward: {correct: {function: m:f, weight: 1.0}, ...}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rlframework.config.environments import DatasetConfig, WeightedReward
from rlframework.environments.judge import Judge
from rlframework.environments.own_reward import OwnReward
from rlframework.environments.reward_calls import FAILURES
from rlframework.interfaces.environment import Sample, StepOutcome


class Reward(Protocol):
    """One reward, or several together."""

    def start(self, folder: Path | None) -> None:
        """See `Environment.start`. Called once before `score`, or not at all."""

    def score(
        self, samples: Sequence[Sample], completions: Sequence[str], *, counted: bool = True
    ) -> list[StepOutcome]:
        """Return one outcome per answer, with the metric `reward_failures`.

        `counted`: raise a `UserError` once too many of these answers have failed.
        """

    def close(self) -> None:
        """End processes, threads and connections."""


class WeightedRewards:
    """Scores answers with several rewards: functions, each in a process of its own, and judges. Theirs are summed.

    The metric NAME of an answer is the reward NAME, without its weight; its own metrics become `NAME_METRIC`.
    `accuracy` is that of the first reward that gives one. An answer for which any reward fails gets `failed_reward`,
    and counts once as failed.
    """

    def __init__(self, config: DatasetConfig) -> None:
        """Load the functions. Raises a `ConfigError` that names the key of one that cannot be used."""
        assert isinstance(config.reward, Mapping)
        self._failed = config.failed_reward
        self._weights = {name: part.weight for name, part in config.reward.items()}
        self._rewards = {name: _part_of(config, name, part) for name, part in config.reward.items()}

    def start(self, folder: Path | None) -> None:
        """See `Reward`. Raises a `ConfigError` if a judge does not answer."""
        for reward in self._rewards.values():
            reward.start(folder)

    def score(
        self, samples: Sequence[Sample], completions: Sequence[str], *, counted: bool = True
    ) -> list[StepOutcome]:
        """See `Reward`. Counts the failures of each reward."""
        parts = {name: reward.score(samples, completions, counted=counted) for name, reward in self._rewards.items()}
        return [self._sum({name: part[number] for name, part in parts.items()}) for number in range(len(samples))]

    def close(self) -> None:
        """End the processes of the functions, and the connections of the judges."""
        for reward in self._rewards.values():
            reward.close()

    def _sum(self, parts: Mapping[str, StepOutcome]) -> StepOutcome:
        failed = any(part.metrics[FAILURES] for part in parts.values())
        metrics = {name: part.reward for name, part in parts.items()} | {FAILURES: float(failed)}
        for name, part in parts.items():
            for metric, value in part.metrics.items():
                if metric == "accuracy":
                    metrics.setdefault(metric, value)
                elif metric != FAILURES:
                    metrics[f"{name}_{metric}"] = value
        if failed:
            return StepOutcome(self._failed, metrics=metrics | {"accuracy": 0.0})
        return StepOutcome(sum(self._weights[name] * part.reward for name, part in parts.items()), metrics=metrics)


def _part_of(config: DatasetConfig, name: str, part: WeightedReward) -> Reward:
    key = f"environment.reward.{name}"
    if part.judge is not None:
        return Judge(config, part.judge, name, f"{key}.judge")
    assert part.function is not None
    return OwnReward(config, part.function, f"{key}.function")


def reward_of(config: DatasetConfig) -> Reward | None:
    """Return what `environment.reward` names: one function, several rewards, or None."""
    if config.reward is None:
        return None
    return OwnReward(config, config.reward) if isinstance(config.reward, str) else WeightedRewards(config)
