"""The update beside the oracle's: how far each tensor has moved from where it started.

Weights hide what a step did: at a learning rate of 1e-6 an update with the wrong sign leaves them 1e-5 apart, and at
1e-2 rounding alone parts them so far that 2% of an update do not show. So what is compared is what was moved by,
`|got - expected| / |expected - start|`, in L2 norms.

Not of all elements. AdamW moves an element by about the learning rate, whatever the size of its gradient, in its first
step by the sign alone: one whose gradient is nothing but rounding goes either way on a sound backend too (the bias of
attention keys, which softmax does not see, is wholly of this kind). Compared are the elements whose first gradient in
the oracle is clearly more than rounding: above `CLEAR` of what is typical of its tensor, and above `FAINT` of what is
typical of the model. An element stays so: Adam divides by the root of all squares so far, of which the first is one.
Without this choice a sound backend was up to 6e-2 off for a tensor, with it 2e-4, at learning rates of 1e-6 to 1e-2.
Elements that the first batch does not reach (rows of an embedding) are thus left to the comparison of the weights.

A weight is rounded when it is decayed and when it is moved, by at most half of `EPS` of itself, on both sides: this
much, relative to the move, is allowed beside `LIMIT`. Rounding of several steps adds up as a random walk does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from rlframework.conformance import measure
from rlframework.conformance.contracts import FP32
from rlframework.conformance.measure import Measurement

if TYPE_CHECKING:
    from torch import Tensor

LIMIT = 5e-3
"""Of how far a tensor has moved, relative to how far it should have, beside rounding; for up to `STEPS` steps."""

STEPS = 20

CLEAR = 100 * FP32
"""Gradients agree to FP32 of their tensor's norm (contract 3); a hundred times that is no rounding."""

FAINT = FP32
"""Of a tensor whose gradient is below this part of the model's nothing but rounding may be left."""

EPS = torch.finfo(torch.float32).eps

Sums = tuple[float, float, float, float]
"""Of squares, over the elements that are compared: got - expected, got - start, expected - start, start."""


@dataclass(frozen=True)
class Start:
    """The weights before the first step, and the elements of each that are compared, as a mask."""

    weights: Mapping[str, Tensor]
    compared: Mapping[str, Tensor]

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], gradients: Mapping[str, Tensor]) -> Start:
        """`gradients`: those of the first step that had any, scaled or not; a tensor that had none is not in it."""
        known = {name: gradients.get(name, torch.zeros_like(weight)) for name, weight in weights.items()}
        count = sum(gradient.numel() for gradient in known.values())
        typical = math.sqrt(sum(float(gradient.double().square().sum()) for gradient in known.values()) / max(count, 1))
        return cls(weights, {name: _clear(gradient, FAINT * typical) for name, gradient in known.items()})

    def tensors(self, got: Mapping[str, Tensor], expected: Mapping[str, Tensor], step: int) -> list[Measurement]:
        """What each tensor has moved by after `step` steps, in the model's order; without those of rounding alone."""
        return [_measured(name, sums, step) for name, sums in self._sums(got, expected)]

    def whole(self, got: Mapping[str, Tensor], expected: Mapping[str, Tensor], step: int) -> Measurement:
        """The same of all as one vector."""
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


def says_something(measurement: Measurement) -> bool:
    """Whether a wrong update would show: not where rounding is as large as the update, which then always "holds"."""
    return measurement.tolerance < 1.0 or not measurement.holds


def _measured(name: str, sums: Sums, step: int) -> Measurement:
    difference, moved, right, start = (math.sqrt(square) for square in sums)
    size = max(right, EPS * start, 1e-30)  # where nothing should move, rounding is what moves are measured by
    allowed = LIMIT * max(1.0, step / STEPS) + 2 * EPS * math.sqrt(step) * start / size
    error = difference / size
    return Measurement(name, math.inf if math.isnan(error) else error, allowed, moved, right, f"moved by, step {step}")


def _clear(gradient: Tensor, faint: float) -> Tensor:
    """The elements that are more than rounding; all where there is no gradient: weight decay alone moves these."""
    reached = gradient[gradient != 0].double()
    if not reached.numel():
        return torch.ones_like(gradient, dtype=torch.bool)
    return gradient.abs() > max(CLEAR * math.sqrt(float(reached.square().mean())), faint)


def _square(tensor: Tensor) -> float:
    return float(tensor.square().sum())
