"""Locate the first divergence from the oracle: its step, quantity and tensor.

Backend and oracle run step by step, and their weights are compared after each. Tensors are compared by their update
(`update`), because an update of half the right size hardly shows in the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.conformance import measure
from rlframework.conformance.contracts import FP32
from rlframework.conformance.measure import Measurement
from rlframework.conformance.parity.measurements import (
    logprobs_measured,
    loss_measured,
    norm_measured,
    open_policy,
    step,
)
from rlframework.conformance.parity.outcome import LOADED, LOGPROBS, WEIGHTS, Candidate, Divergence
from rlframework.conformance.policies import InspectedPolicy, weights_of

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.conformance.parity.scenario import Scenario
    from rlframework.plugins.manager import PluginManager


def find_divergence(
    scenario: Scenario, candidate: Candidate, *, manager: PluginManager, folder: Path
) -> Divergence | None:
    """Run `scenario` again step by step; return None if nothing exceeds its tolerance in any step."""
    first: Divergence | None = None
    with open_policy(scenario, candidate, manager) as policy:
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
    logprobs = [policy.get_logprobs(batch)["logprobs"] for batch in scenario.batches]
    yield 0, [logprobs_measured(logprobs, scenario.answers.logprobs)[LOGPROBS]], loaded, names
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
