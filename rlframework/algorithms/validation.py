"""Validation during a run: answers to the first held-out samples, one or several of each, and their scores."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import Tensor

from rlframework.algorithms.intervals import default_ks, estimate, pass_at_k
from rlframework.plugins.hookspec import SampleRecord
from rlframework.rollout.result import Rollout
from rlframework.rollout.seeds import row_seeds
from rlframework.rollout.step_rollouts import rollout

if TYPE_CHECKING:
    from rlframework.rollout.parts import Parts

_LOG = logging.getLogger(__name__)


def validate(parts: Parts, step: int, warned: set[str]) -> tuple[dict[str, float], list[SampleRecord]]:
    """Score answers to the first held-out samples, as `ValidationConfig` says; return metrics and some of the samples.

    Attempts have the same seeds at each step, so that steps can be compared. `warned`: metrics that the run warned of.
    """
    section = parts.config.algorithm.validation
    samples = parts.environment.samples("validation")[: section.samples]
    rows = [sample for sample in samples for _ in range(section.attempts)]
    temperature = section.temperature_of(parts.config.generation)
    result = rollout(parts, rows, row_seeds(parts.config.seed, 0, len(rows)), temperature=temperature)
    _note_accuracy(step, result, warned)
    found = dict(result.metrics)
    if section.attempts > 1:
        found |= attempt_metrics(result.accuracies, section.attempts)
    found["samples"] = float(len(samples))
    metrics = {f"validation/{name}": value for name, value in found.items()}
    return metrics, result.records(step, "validation", parts.config.observers.samples, parts.tokenizer)


def _note_accuracy(step: int, result: Rollout, warned: set[str]) -> None:
    """Warn, once per run, that no reward is large enough to be right although rewards differ."""
    rewards = result.rewards[~result.failed].unique().tolist()  # in ascending order
    if "validation/accuracy" in warned or bool(result.accuracies.any()) or len(rewards) < 2 or rewards[-1] >= 1.0:
        return
    warned.add("validation/accuracy")
    _LOG.warning(
        f"step {step}: validation/accuracy is 0, and rewards are from {rewards[0]:.3g} to {rewards[-1]:.3g}. An answer "
        "or attempt without `accuracy` is right if its reward is at least 1. If none can be, return `accuracy` beside "
        "the reward, or set algorithm.early_stopping.metric and checkpoints.metric to another, as validation/reward"
    )


def attempt_metrics(accuracies: Tensor, attempts: int) -> dict[str, float]:
    """Return avg@k for all attempts, pass@k, and their intervals over prompts, `_low` and `_high`.

    `accuracies [P * attempts]`: those of a prompt are adjacent. A mean without an interval, as of equal values, has
    neither.
    """
    means = {f"avg@{attempts}": accuracies.double().view(-1, attempts).mean(1).tolist()}
    metrics = dict[str, float]()
    for name, values in (means | pass_rates(accuracies, attempts, default_ks(attempts)[1:])).items():
        of_prompts = estimate(values)
        metrics[name] = of_prompts.value
        if of_prompts.low is not None and of_prompts.high is not None:
            metrics |= {f"{name}_low": of_prompts.low, f"{name}_high": of_prompts.high}
    return metrics


def pass_rates(accuracies: Tensor, attempts: int, ks: Iterable[int]) -> dict[str, list[float]]:
    """Return pass@k of each prompt for each of `ks`; `accuracies [P * attempts]` as of `attempt_metrics`."""
    right = (accuracies >= 1.0).view(-1, attempts).sum(1).tolist()
    return {f"pass@{k}": [pass_at_k(attempts, number, k) for number in right] for k in ks}
