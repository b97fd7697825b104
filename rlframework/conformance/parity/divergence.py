"""Where a backend first parts from the oracle: in which step, in which quantity, and in which tensor.

Both go step by step, and their weights are compared after each. What is compared of a tensor is how far it has moved
(`update`): an update which is half as large as it should be hardly shows in the weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.conformance import measure
from rlframework.conformance.contracts import FP32
from rlframework.conformance.measure import Measurement
from rlframework.conformance.parity.measurements import logprobs_measured, loss_measured, norm_measured, opened, step
from rlframework.conformance.parity.outcome import LOADED, LOGPROBS, WEIGHTS, Divergence, Subject
from rlframework.conformance.policies import InspectedPolicy, weights_of

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.conformance.parity.reference import Exam
    from rlframework.plugins.manager import PluginManager


def find_divergence(exam: Exam, subject: Subject, *, manager: PluginManager, folder: Path) -> Divergence | None:
    """Go through `exam` once more, step by step; None where nothing is beyond its tolerance in any step."""
    first: Divergence | None = None
    with opened(exam, subject, manager) as policy:
        for number, found, tensors, of in _events(exam, policy, folder):
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
    exam: Exam, policy: InspectedPolicy, folder: Path
) -> Iterator[tuple[int, list[Measurement], dict[str, Measurement], int]]:
    """For each step: its number, what was measured in order, the tensors beyond their tolerance, of how many."""
    oracle = exam.oracle()
    start = exam.answers.start
    names = len(start.weights)
    loaded = _beyond(_loaded(weights_of(policy, folder / "weights"), start.weights))
    logprobs = [policy.get_logprobs(batch)["logprobs"] for batch in exam.batches]
    yield 0, [logprobs_measured(logprobs, exam.answers.logprobs)[LOGPROBS]], loaded, names
    policy.prepare_for_training()
    for number, batch in enumerate(exam.batches, start=1):
        got, expected = step(policy, exam, batch), exam.take(oracle, batch)
        found = [
            loss_measured(exam, number, got[0], expected[0]),
            norm_measured(number, got[1], expected[1]),
        ]
        moved = start.tensors(weights_of(policy, folder / "weights"), oracle.weights(), number)
        yield number, found, _beyond(moved), names


def _loaded(got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> list[Measurement]:
    measure.require_names("the weights", got, expected)
    return [measure.norm(name, got[name], want, FP32, floor=1e-12) for name, want in expected.items()]


def _beyond(tensors: Sequence[Measurement]) -> dict[str, Measurement]:
    """Those that are beyond their tolerance, in the model's order."""
    return {found.quantity: found for found in tensors if not found.holds}
