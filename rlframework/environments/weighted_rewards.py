"""Several reward functions with weights: `environment.reward: {correct: {function: m:f, weight: 1.0}, ...}`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlframework.config.environments import DatasetConfig
from rlframework.environments.own_reward import OwnReward
from rlframework.environments.reward_calls import FAILURES
from rlframework.interfaces.environment import Sample, StepOutcome


class WeightedRewards:
    """Scores answers with several functions, each in a process of its own. The reward is the weighted sum of theirs.

    The metric NAME of an answer is the reward of the function NAME, without its weight; the functions' own metrics
    become `NAME_METRIC`. `accuracy` is that of the first function that gives one. An answer for which any function
    fails gets `failed_reward`, and counts once as failed.
    """

    def __init__(self, config: DatasetConfig) -> None:
        """Load the functions. Raises a `ConfigError` that names the key of one that cannot be used."""
        assert isinstance(config.reward, Mapping)
        self._failed = config.failed_reward
        self._weights = {name: part.weight for name, part in config.reward.items()}
        self._functions = {
            name: OwnReward(config, part.function, f"environment.reward.{name}.function")
            for name, part in config.reward.items()
        }

    def score(self, samples: Sequence[Sample], completions: Sequence[str]) -> list[StepOutcome]:
        """Return one outcome per answer. Raises a `UserError` once too many answers of a function have failed."""
        parts = {name: function.score(samples, completions) for name, function in self._functions.items()}
        return [self._sum({name: part[number] for name, part in parts.items()}) for number in range(len(samples))]

    def close(self) -> None:
        """End the processes of the functions."""
        for function in self._functions.values():
            function.close()

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


def reward_of(config: DatasetConfig) -> OwnReward | WeightedRewards | None:
    """Return what `environment.reward` names: one function, several, or None."""
    if config.reward is None:
        return None
    return OwnReward(config, config.reward) if isinstance(config.reward, str) else WeightedRewards(config)
