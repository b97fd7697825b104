"""Run a backend on a scenario, measure its differences from the oracle, and locate the first one.

If the backend fails, it and the oracle run again step by step, and their weights are compared after each. Tensors are
compared by their update (`update`), because an update of half the right size hardly shows in the weights.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlframework.base.errors import RLFrameworkError, UserError
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework_conformance import measure
from rlframework_conformance.contracts import BF16, FP32, TENSOR_AFTER_20_STEPS, WEIGHTS_AFTER_20_STEPS
from rlframework_conformance.measure import Measurement
from rlframework_conformance.parity.outcome import (
    AFTER_STEPS,
    LOADED,
    LOGPROBS,
    LOSS,
    MEAN,
    NORM,
    TENSOR,
    UPDATE,
    WEIGHTS,
    Candidate,
    Divergence,
    Observed,
    Outcome,
    Steps,
)
from rlframework_conformance.parity.update import is_informative
from rlframework_conformance.policies import DEADLINES, InspectedPolicy, run_config, weights_of
from rlframework_conformance.sections import merged, parse_section

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.plugins.manager import PluginManager
    from rlframework_conformance.parity.scenario import Scenario


def compare_with_oracle(
    scenario: Scenario, candidate: Candidate, *, manager: PluginManager, folder: Path, named: bool
) -> Outcome:
    """Run `candidate` on `scenario` and, if it fails, find where it first diverges from the oracle.

    `named`: the user named this candidate, so failing to build it is an error.
    """
    started = time.perf_counter()
    try:
        policy = open_policy(scenario, candidate, manager)
    except UserError as error:
        return Outcome(candidate, scenario.name, reason=first_line(error), error=named, built=False)
    except Exception as error:  # noqa: BLE001 - a broken backend is reported, the others continue
        return Outcome(candidate, scenario.name, reason=first_line(error), error=True)
    with policy:
        try:
            outcome = _measured(scenario, candidate, policy, folder)
        except Exception as error:  # noqa: BLE001 - as above, also for user errors: it was built, so it must run
            return Outcome(candidate, scenario.name, reason=first_line(error), error=True)
    if outcome.fails:
        outcome = replace(outcome, divergence=find_divergence(scenario, candidate, manager=manager, folder=folder))
    return replace(outcome, seconds=time.perf_counter() - started)


def _measured(scenario: Scenario, candidate: Candidate, policy: InspectedPolicy, folder: Path) -> Outcome:
    outputs = [outputs_of(policy, batch) for batch in scenario.batches]
    policy.prepare_for_training()
    steps = [step(policy, scenario, batch) for batch in scenario.batches[:1]]
    first = last = weights_of(policy, folder / "weights")
    if later := [step(policy, scenario, batch) for batch in scenario.batches[1:]]:
        steps, last = steps + later, weights_of(policy, folder / "weights")
    outcome = compare_results(scenario, candidate, outputs, steps, (first, last))
    return replace(outcome, observed=Observed(outputs, steps))


def outputs_of(policy: InspectedPolicy, batch: Any) -> Tensor:
    """Return log-probabilities or values, `[B, S]`, or scores, `[B]`, by the policy's head."""
    head = policy.config.policy.head
    if head == "language":
        found: Tensor = policy.get_logprobs(batch)["logprobs"]
    elif head == "value":
        found = policy.get_values(batch)["values"]
    else:
        found = policy.score(batch)["scores"]
    return found


def first_line(error: BaseException) -> str:
    """Return the first line of an error message; for a worker's error, with the end of its traceback."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = lines[0] if not lines[0].endswith(":") else f"{lines[0]} {lines[-1]}"
    return text if isinstance(error, RLFrameworkError) else f"{type(error).__name__}: {text}"


# -- the first divergence ----------------------------------------------------------------------------------------------


def find_divergence(
    scenario: Scenario, candidate: Candidate, *, manager: PluginManager, folder: Path
) -> Divergence | None:
    """Run `scenario` again step by step; return None if nothing exceeds its tolerance in any step."""
    first: Divergence | None = None
    policy = open_policy(scenario, candidate, manager)
    with policy:
        for number, found, tensors, of in _events(scenario, policy, folder):
            beyond = next((measurement for measurement in found if not measurement.holds), None)
            if first is None and beyond is not None and not (tensors and number == 0):
                first = Divergence(beyond.quantity, number, beyond)
            if tensors:
                name, farthest = next(iter(tensors.items()))
                first = first or Divergence(LOADED if not number else WEIGHTS, number, farthest)
                return replace(
                    first,
                    tensor=name,
                    tensor_step=number,
                    tensor_error=farthest.error,
                    tensors=len(tensors),
                    of=of,
                )
    return first


def _events(
    scenario: Scenario, policy: InspectedPolicy, folder: Path
) -> Iterator[tuple[int, list[Measurement], dict[str, Measurement], int]]:
    """Yield for each step its number, the measurements in order, the tensors beyond tolerance, and the number of
    tensors.
    """
    oracle = scenario.oracle()
    start = scenario.answers.start
    names = len(start.weights)
    loaded = _beyond(_loaded(weights_of(policy, folder / "weights"), start.weights))
    outputs = [outputs_of(policy, batch) for batch in scenario.batches]
    yield 0, [logprobs_measured(outputs, scenario.answers.outputs)[LOGPROBS]], loaded, names
    policy.prepare_for_training()
    for number, batch in enumerate(scenario.batches, start=1):
        got, expected = step(policy, scenario, batch), scenario.oracle_step(oracle, batch)
        found = [
            loss_measured(scenario, number, got[0], expected[0]),
            norm_measured(number, got[1], expected[1]),
        ]
        moved = start.tensors(weights_of(policy, folder / "weights"), oracle.weights(), number)
        yield number, found, _beyond(moved), names


def _loaded(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[Measurement]:
    measure.require_names("the weights", got, expected)
    return [measure.norm(name, got[name], want, FP32, floor=1e-12) for name, want in expected.items()]


def _beyond(tensors: Sequence[Measurement]) -> dict[str, Measurement]:
    """Return the measurements beyond their tolerance, in the model's order."""
    return {found.quantity: found for found in tensors if not found.holds}


# -- measured differences ----------------------------------------------------------------------------------------------


def open_policy(scenario: Scenario, candidate: Candidate, manager: PluginManager) -> InspectedPolicy:
    """Build the candidate's policy on the scenario's model with a fresh optimizer; shut it down by `with`."""
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
        deadlines={**DEADLINES, "start": 600.0, "call": 1800.0},
        **settings,
    )
    tokenizer = load_tokenizer(str(scenario.model), config.policy.trust_remote_code)
    calls = len(scenario.batches)
    return InspectedPolicy(
        config, tokenizer, manager, device=candidate.device, training_calls=calls, mutant=candidate.mutant
    )


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
        **logprobs_measured(logprobs, answers.outputs[: len(logprobs)]),
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
    errors = torch.cat([measure.errors_of(*pair)[pair[1] != 0] for pair in pairs])
    mean = float(errors.mean()) if errors.numel() else 0.0
    return {
        LOGPROBS: farthest([measure.values(LOGPROBS, *pair, FP32) for pair in pairs]),
        MEAN: Measurement(MEAN, mean, BF16, mean, 0.0, "mean of all errors"),
    }


def loss_measured(scenario: Scenario, number: int, got: float, expected: float) -> Measurement:
    """Measure the loss of step `number`."""
    tolerance = FP32 if number == 1 else AFTER_STEPS
    return measure.scalar(LOSS, got, expected, tolerance, floor=scenario.floor, place=f"step {number}")


def norm_measured(number: int, got: float, expected: float) -> Measurement:
    """Measure the gradient norm of step `number`."""
    return measure.scalar(NORM, got, expected, FP32 if number == 1 else AFTER_STEPS, place=f"step {number}")


def farthest(measurements: Sequence[Measurement]) -> Measurement:
    """Return the measurement with the largest error relative to its tolerance, the first of several."""
    return max(measurements, key=lambda measurement: measurement.error / measurement.tolerance)
