"""Measured differences between a backend and the oracle: log-probabilities, losses, norms, weights, updates."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from rlframework.conformance import measure
from rlframework.conformance.contracts import BF16, FP32, TENSOR_AFTER_20_STEPS, WEIGHTS_AFTER_20_STEPS
from rlframework.conformance.measure import Measurement
from rlframework.conformance.parity.outcome import (
    AFTER_STEPS,
    LOGPROBS,
    LOSS,
    MEAN,
    NORM,
    TENSOR,
    UPDATE,
    WEIGHTS,
    Candidate,
    Outcome,
    Steps,
)
from rlframework.conformance.parity.update import is_informative
from rlframework.conformance.policies import DEADLINES, InspectedPolicy, run_config
from rlframework.conformance.sections import merged, parse_section
from rlframework.huggingface.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.conformance.parity.scenario import Scenario
    from rlframework.plugins.manager import PluginManager


@contextmanager
def open_policy(scenario: Scenario, candidate: Candidate, manager: PluginManager) -> Iterator[InspectedPolicy]:
    """Build the candidate's policy on the scenario's model with a fresh optimizer."""
    section = merged(scenario.sections.get(candidate.backend, {}), parse_section(candidate.keys))
    settings = {
        **({candidate.backend: section} if section else {}),
        "train_global_batch_size": scenario.batches[0].size,
        "max_grad_norm": scenario.max_grad_norm,
        **scenario.settings,
        "precision": candidate.precision,
        "optimizer": {"lr": scenario.lr, **scenario.optimizer},
    }
    config = run_config(
        candidate.backend,
        scenario.model,
        candidate.layout,
        manager=manager,
        device=candidate.device,
        generation={"temperature": scenario.temperature},
        deadlines={**DEADLINES, "call": 1800.0},
        **settings,
    )
    tokenizer = load_tokenizer(str(scenario.model), config.policy.trust_remote_code)
    count = len(scenario.batches)
    policy = InspectedPolicy(
        config, tokenizer, manager, device=candidate.device, training_calls=count, mutant=candidate.mutant
    )
    with policy:
        yield policy


def step(policy: InspectedPolicy, scenario: Scenario, batch: Any) -> tuple[float, float]:
    """Take one optimizer step; return the loss before it and the gradient norm before clipping."""
    result = policy.train(batch, scenario.loss, gbs=batch.size)
    return float(result["loss"]), float(result["grad_norm"][0])


def compare_results(
    scenario: Scenario,
    candidate: Candidate,
    logprobs: Sequence[Tensor],
    steps: Steps,
    weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None,
) -> Outcome:
    """Measure the differences from the oracle's answers; fewer batches or steps than the scenario's are its first.

    `weights`: those after the first step and after all steps, if known.
    """
    answers = scenario.answers
    pairs = list(enumerate(zip(steps, answers.steps[: len(steps)], strict=True), start=1))
    measurements = {
        **logprobs_measured(logprobs, answers.logprobs[: len(logprobs)]),
        LOSS: farthest([loss_measured(scenario, number, got[0], want[0]) for number, (got, want) in pairs]),
        NORM: farthest([norm_measured(number, got[1], want[1]) for number, (got, want) in pairs]),
    }
    if weights is not None:
        measurements.update(_weights_measured(scenario, *weights))
    return Outcome(candidate, scenario.name, measurements)


def _weights_measured(
    scenario: Scenario, first: Mapping[str, Tensor], last: Mapping[str, Tensor]
) -> Iterator[tuple[str, Measurement]]:
    answers, after = scenario.answers, scenario.answers.weights
    measure.require_names("the weights that save_pretrained wrote", last, after)
    yield WEIGHTS, measure.whole("weights", last, after, WEIGHTS_AFTER_20_STEPS * scenario.slack)
    updates = [
        *answers.start.tensors(first, answers.first, 1),
        answers.start.whole(last, after, len(scenario.batches)),
    ]
    if informative := [found for found in updates if is_informative(found)]:
        yield UPDATE, farthest(informative)
    allowed = TENSOR_AFTER_20_STEPS * scenario.slack
    yield TENSOR, farthest([measure.norm(name, last[name], after[name], allowed) for name in after])


def logprobs_measured(got: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, Measurement]:
    """Measure the worst log-probability and the mean error over all tokens."""
    pairs = list(zip(got, expected, strict=True))
    errors = torch.cat([_errors(*pair)[pair[1] != 0] for pair in pairs])
    mean = float(errors.mean()) if errors.numel() else 0.0
    return {
        LOGPROBS: farthest([measure.values(LOGPROBS, *pair, FP32) for pair in pairs]),
        MEAN: Measurement(MEAN, math.inf if math.isnan(mean) else mean, BF16, mean, 0.0, "mean of all errors"),
    }


def _errors(got: Tensor, expected: Tensor) -> Tensor:
    got, expected = got.double(), expected.double()
    return (got - expected).abs() / expected.abs().clamp(min=1.0)


def loss_measured(scenario: Scenario, number: int, got: float, expected: float) -> Measurement:
    """Measure the loss of step `number`."""
    size = max(abs(expected), scenario.floor, 1e-30)
    error = 0.0 if got == expected else abs(got - expected) / size
    tolerance = FP32 if number == 1 else AFTER_STEPS
    return Measurement(LOSS, math.inf if math.isnan(error) else error, tolerance, got, expected, f"step {number}")


def norm_measured(number: int, got: float, expected: float) -> Measurement:
    """Measure the gradient norm of step `number`."""
    found = measure.scalar(NORM, got, expected, FP32 if number == 1 else AFTER_STEPS)
    return replace(found, place=f"step {number}")


def farthest(measurements: Sequence[Measurement]) -> Measurement:
    """Return the measurement with the largest error relative to its tolerance, the first of several."""
    return max(measurements, key=lambda measurement: measurement.error / measurement.tolerance)
