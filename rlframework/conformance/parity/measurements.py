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
    Outcome,
    Steps,
    Subject,
)
from rlframework.conformance.parity.update import says_something
from rlframework.conformance.policies import DEADLINES, InspectedPolicy, run_config
from rlframework.conformance.sections import merged, parse_section
from rlframework.huggingface.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.conformance.parity.reference import Exam
    from rlframework.plugins.manager import PluginManager


@contextmanager
def opened(exam: Exam, subject: Subject, manager: PluginManager) -> Iterator[InspectedPolicy]:
    """The policy of `subject`, on the exam's model with a fresh optimizer."""
    section = merged(exam.sections.get(subject.backend, {}), parse_section(subject.keys))
    settings = {
        **({subject.backend: section} if section else {}),
        "train_global_batch_size": exam.batches[0].size,
        "max_grad_norm": exam.max_grad_norm,
        **exam.settings,
        "precision": subject.precision,
        "optimizer": {"lr": exam.lr, **exam.optimizer},
    }
    config = run_config(
        subject.backend,
        exam.model,
        subject.layout,
        manager=manager,
        device=subject.device,
        generation={"temperature": exam.temperature},
        deadlines={**DEADLINES, "call": 1800.0},
        **settings,
    )
    tokenizer = load_tokenizer(str(exam.model), config.policy.trust_remote_code)
    count = len(exam.batches)
    policy = InspectedPolicy(
        config, tokenizer, manager, device=subject.device, training_calls=count, mutant=subject.mutant
    )
    with policy:
        yield policy


def step(policy: InspectedPolicy, exam: Exam, batch: Any) -> tuple[float, float]:
    """One optimizer step: the loss before it, and the gradient's norm before clipping."""
    result = policy.train(batch, exam.loss, gbs=batch.size)
    return float(result["loss"]), float(result["grad_norm"][0])


def compared(
    exam: Exam,
    subject: Subject,
    logprobs: Sequence[Tensor],
    steps: Steps,
    weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None,
) -> Outcome:
    """How far these are from the oracle's answers. Fewer batches or steps than the exam has are its first.

    `weights`: those after the first step and after all, where they are known.
    """
    answers = exam.answers
    pairs = list(enumerate(zip(steps, answers.steps[: len(steps)], strict=True), start=1))
    measurements = {
        **logprobs_measured(logprobs, answers.logprobs[: len(logprobs)]),
        LOSS: farthest([loss_measured(exam, number, got[0], want[0]) for number, (got, want) in pairs]),
        NORM: farthest([norm_measured(number, got[1], want[1]) for number, (got, want) in pairs]),
    }
    if weights is not None:
        measurements.update(_weights_measured(exam, *weights))
    return Outcome(subject, exam.name, measurements)


def _weights_measured(
    exam: Exam, first: Mapping[str, Tensor], last: Mapping[str, Tensor]
) -> Iterator[tuple[str, Measurement]]:
    answers, after = exam.answers, exam.answers.weights
    measure.require_names("the weights that save_pretrained wrote", last, after)
    yield WEIGHTS, measure.whole("weights", last, after, WEIGHTS_AFTER_20_STEPS * exam.slack)
    updates = [
        *answers.start.tensors(first, answers.first, 1),
        answers.start.whole(last, after, len(exam.batches)),
    ]
    if telling := [found for found in updates if says_something(found)]:
        yield UPDATE, farthest(telling)
    allowed = TENSOR_AFTER_20_STEPS * exam.slack
    yield TENSOR, farthest([measure.norm(name, last[name], after[name], allowed) for name in after])


def logprobs_measured(got: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, Measurement]:
    """The farthest of all log-probabilities, and the mean error of those that are of a token."""
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


def loss_measured(exam: Exam, number: int, got: float, expected: float) -> Measurement:
    """The loss of step `number`."""
    size = max(abs(expected), exam.floor, 1e-30)
    error = 0.0 if got == expected else abs(got - expected) / size
    tolerance = FP32 if number == 1 else AFTER_STEPS
    return Measurement(LOSS, math.inf if math.isnan(error) else error, tolerance, got, expected, f"step {number}")


def norm_measured(number: int, got: float, expected: float) -> Measurement:
    """The norm of the gradient of step `number`."""
    found = measure.scalar(NORM, got, expected, FP32 if number == 1 else AFTER_STEPS)
    return replace(found, place=f"step {number}")


def farthest(measurements: Sequence[Measurement]) -> Measurement:
    """The one with the largest error as a part of its tolerance; the first of several."""
    return max(measurements, key=lambda measurement: measurement.error / measurement.tolerance)
