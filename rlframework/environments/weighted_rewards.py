"""Several rewards with weights: `environment.reward: {correct: {function: m:f, weight: 1.0}, ...}`."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, cast

from rlframework.config.environments import DatasetConfig, WeightedReward
from rlframework.environments.counted_failures import ABSENT
from rlframework.environments.own_reward import OwnReward
from rlframework.environments.reward_calls import FAILURES
from rlframework.interfaces.environment import Sample, StepOutcome
from rlframework.plugins.manager import load_from_plugin

_LOG = logging.getLogger(__name__)

_ANSWERS_TO_JUDGE = 16
"""Answers after which a reward that was never 1 may be one that cannot be, such as a penalty."""


class Reward(Protocol):
    """One reward, or several together."""

    def check_columns(self, columns: Collection[str], source: str) -> None:
        """Raise a `ConfigError` if a function needs a column by name that is not in `columns`, those of `source`."""

    def asked_of(self, sample: Sample) -> Mapping[str, Any]:
        """The values in `sample` of the columns that functions ask for by name; None for one that it lacks."""

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
    `accuracy` is that of the first reward that gives one; without one, an answer counts as right if, of the rewards
    that it has, each with the largest weight is at least 1. An answer for which any reward fails gets `failed_reward`,
    and counts once as failed. A function that returns None for an answer is left out of its sum and metrics; if all do,
    the answer has failed.
    """

    def __init__(self, config: DatasetConfig) -> None:
        """Load the functions. Raises a `ConfigError` that names the key of one that cannot be used."""
        assert isinstance(config.reward, Mapping)
        self._failed = config.failed_reward
        self._warned = self._warned_of_accuracy = False
        self._judged, self._highest = 0, dict[str, float]()
        self._weights = {name: part.weight for name, part in config.reward.items()}
        self._rewards = {name: _part_of(config, name, part) for name, part in config.reward.items()}

    def check_columns(self, columns: Collection[str], source: str) -> None:
        """See `Reward`."""
        for reward in self._rewards.values():
            reward.check_columns(columns, source)

    def asked_of(self, sample: Sample) -> dict[str, Any]:
        """See `Reward`."""
        return {name: value for reward in self._rewards.values() for name, value in reward.asked_of(sample).items()}

    def start(self, folder: Path | None) -> None:
        """See `Reward`. Raises a `ConfigError` if a judge does not answer."""
        for reward in self._rewards.values():
            reward.start(folder)

    def score(
        self, samples: Sequence[Sample], completions: Sequence[str], *, counted: bool = True
    ) -> list[StepOutcome]:
        """See `Reward`. Counts the failures of each reward."""
        parts = {name: reward.score(samples, completions, counted=counted) for name, reward in self._rewards.items()}
        of_answers = [{name: part[number] for name, part in parts.items()} for number in range(len(samples))]
        return [self._sum(sample, of_answer) for sample, of_answer in zip(samples, of_answers, strict=True)]

    def close(self) -> None:
        """End the processes of the functions, and the connections of the judges."""
        for reward in self._rewards.values():
            reward.close()

    def _sum(self, sample: Sample, every: Mapping[str, StepOutcome]) -> StepOutcome:
        parts = {name: part for name, part in every.items() if part is not ABSENT}
        failed = not parts or any(part.metrics[FAILURES] for part in parts.values())
        if not parts and not self._warned:
            self._warned = True
            _LOG.warning("environment.reward: every function returned None for an answer to sample %r", sample.id)
        metrics = {name: part.reward for name, part in parts.items()} | {FAILURES: float(failed)}
        for name, part in parts.items():
            for metric, value in part.metrics.items():
                if metric == "accuracy":
                    metrics.setdefault(metric, value)
                elif metric != FAILURES:
                    metrics[f"{name}_{metric}"] = value
        if failed:
            return StepOutcome(self._failed, metrics=metrics | {"accuracy": 0.0})
        largest = max(self._weights[name] for name in parts)
        deciding = {name: part.reward for name, part in parts.items() if self._weights[name] == largest}
        right = all(reward >= 1.0 for reward in deciding.values())
        if "accuracy" not in metrics:
            self._warn_of_accuracy(deciding)
        total = sum(self._weights[name] * part.reward for name, part in parts.items())
        return StepOutcome(total, metrics={"accuracy": float(right), **metrics})

    def _warn_of_accuracy(self, deciding: Mapping[str, float]) -> None:
        """Warn once if no answer counts as right because one of several rewards that decide it has never been 1."""
        self._judged += 1
        for name, reward in deciding.items():
            self._highest[name] = max(reward, self._highest.get(name, reward))
        low = [name for name, highest in self._highest.items() if highest < 1.0]
        if self._warned_of_accuracy or self._judged < _ANSWERS_TO_JUDGE or not 0 < len(low) < len(self._highest):
            return
        self._warned_of_accuracy = True
        others = ", ".join(name for name in self._highest if name not in low)
        for name in low:
            _LOG.warning(
                "environment.reward.%s was at most %g in %d answers, and shares the largest weight with %s: accuracy "
                "is 0 unless all of these are 1. If it cannot be 1, as a penalty, set environment.reward.%s.weight "
                "lower, or let a function return accuracy: {\"reward\": ..., \"accuracy\": ...}",
                name, self._highest[name] + 0.0, self._judged, others, name,
            )  # fmt: skip


def _part_of(config: DatasetConfig, name: str, part: WeightedReward) -> Reward:
    key = f"environment.reward.{name}"
    if part.judge is not None:
        judge = load_from_plugin((), "rlframework_judge", f"{key}.judge")
        return cast(Reward, judge(config, part.judge, name, f"{key}.judge"))
    assert part.function is not None
    return OwnReward(config, part.function, f"{key}.function", optional=True)


def reward_of(config: DatasetConfig) -> Reward | None:
    """Return what `environment.reward` names: one function, several rewards, or None."""
    if config.reward is None:
        return None
    return OwnReward(config, config.reward) if isinstance(config.reward, str) else WeightedRewards(config)
