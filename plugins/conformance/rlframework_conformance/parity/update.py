"""Compare a backend's update with the oracle's: the distance each tensor has moved from its start.

Weights alone hide a step: at a learning rate of 1e-6 an update with the wrong sign leaves them 1e-5 apart, and at 1e-2
rounding alone separates them so far that 2% of an update does not show. So the update itself is compared, `|got -
expected| / |expected - start|`, in L2 norms.

Some elements are excluded. AdamW moves an element by about the learning rate whatever the size of its gradient, in the
first step by its sign alone. An element whose gradient is only rounding moves either way on a correct backend too; the
bias of attention keys, which softmax ignores, consists of such elements. Only elements whose first gradient in the
oracle is clearly above rounding are compared: above `CLEAR` times the typical gradient of the tensor and `FAINT` times
that of the model. They stay comparable, because Adam divides by the root of all past squares, including the first.
Without this selection a correct backend was up to 6e-2 off for a tensor, with it 2e-4, at learning rates from 1e-6 to
1e-2. Elements without gradient in the first batch (rows of an embedding) are covered by the comparison of weights.

A weight is rounded when it is decayed and when it is moved, each time by at most half of `EPS` of itself, on both
sides. This much, relative to the update, is allowed in addition to `LIMIT`; over several steps it grows as a random
walk.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlframework_conformance import measure
from rlframework_conformance.contracts import FP32
from rlframework_conformance.measure import Measurement

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = 5e-3
"""Tolerance of an update relative to its size, in addition to rounding, for up to `STEPS` steps."""

STEPS = 20

CLEAR = 100 * FP32
"""Gradients agree to FP32 of their tensor's norm (contract 3); a hundred times that is not rounding."""

FAINT = FP32
"""A tensor whose gradient is below this fraction of the model's may contain only rounding."""

EPS = torch.finfo(torch.float32).eps

Sums = tuple[float, float, float, float]
"""Sums of squares over the compared elements: got - expected, got - start, expected - start, start."""


@dataclass(frozen=True)
class Start:
    """The weights before the first step, and a mask of the compared elements of each."""

    weights: Mapping[str, Tensor]
    compared: Mapping[str, Tensor]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Start:
        """Select the compared elements by `gradients`, those of the first step that had any, at any scale.

        A tensor without a gradient may be missing.
        """
        known = {name: gradients.get(name, torch.zeros_like(weight)) for name, weight in weights.items()}
        count = sum(gradient.numel() for gradient in known.values())
        typical = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in known.values()) / max(count, 1))
        return cls(weights, {name: _clear(gradient, FAINT * typical) for name, gradient in known.items()})

    def tensors(self, got: Mapping[str, Tensor], expected: Mapping[str, Tensor], step: int) -> list[Measurement]:
        """Measure each tensor's update after `step` steps, in the model's order; tensors with only rounding are
        skipped.
        """
        return [_measured(name, sums, step) for name, sums in self._sums(got, expected)]

    def whole(self, got: Mapping[str, Tensor], expected: Mapping[str, Tensor], step: int) -> Measurement:
        """Measure the update of all tensors as one vector."""
        columns = zip(*(sums for _, sums in self._sums(got, expected)), strict=True)
        difference, moved, right, start = (sum(column) for column in columns)
        return _measured("all tensors", (difference, moved, right, start), step)

    def _sums(self, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> Iterator[tuple[str, Sums]]:
        measure.require_names("the weights", got, expected)
        for name, mask in self.compared.items():
            if mask.any():
                yield name, self._sums_of(name, got[name], expected[name])

    def _sums_of(self, name: str, got: Tensor, expected: Tensor) -> Sums:
        measure.require_shape(name, got, expected)
        mask = self.compared[name]
        found, want, start = (tensor.detach().cpu()[mask].double() for tensor in (got, expected, self.weights[name]))
        return _square(found - want), _square(found - start), _square(want - start), _square(start)


def is_informative(measurement: Measurement) -> bool:
    """Return True if a wrong update would show; False if rounding is as large as the update."""
    return measurement.tolerance < 1.0 or not measurement.holds


def _measured(name: str, sums: Sums, step: int) -> Measurement:
    difference, moved, right, start = (math.sqrt(square) for square in sums)
    size = max(right, EPS * start, 1e-30)  # if nothing should move, the error is relative to rounding
    allowed = LIMIT * max(1.0, step / STEPS) + 2 * EPS * math.sqrt(step) * start / size
    return Measurement(name, difference / size, allowed, moved, right, f"moved by, step {step}")


def _clear(gradient: Tensor, faint: float) -> Tensor:
    """Return the elements above rounding, or all if there is no gradient: only weight decay moves these."""
    reached = gradient[gradient != 0].double()
    if not reached.numel():
        return torch.ones_like(gradient, dtype=torch.bool)
    return gradient.abs() > max(CLEAR * math.sqrt(float(reached.square().mean())), faint)


def _square(tensor: Tensor) -> float:
    return float(tensor.square().sum())
