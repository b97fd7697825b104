"""Comparison of numbers with the correct ones: measurements, and failures: wrong numbers, and methods not written yet.

Errors are relative: `values` element by element to max(1, |expected|), `norm` by the L2 norms of whole tensors,
`scalar` to |expected|. `exact` requires equal values. An unexpected NaN or infinity is an infinite error.
"""

from __future__ import annotations

import math
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import RLFrameworkError, WorkerError
from rlframework_conformance.contracts import CONTRACTS

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Measurement:
    """The error of `quantity`, with `got` and `expected` at the place where it is largest. NaN is an infinite error."""

    quantity: str
    error: float
    tolerance: float
    got: float
    expected: float
    place: str = ""

    def __post_init__(self) -> None:
        if math.isnan(self.error):
            object.__setattr__(self, "error", math.inf)

    @property
    def holds(self) -> bool:
        """Whether the error is within the tolerance."""
        return self.error <= self.tolerance


class ConformanceFailure(AssertionError):
    """An implementation violates a contract."""


class MutantNotApplicable(RLFrameworkError):
    """A mutant cannot be made of this implementation, so it proves nothing about it."""


def scalar(
    quantity: str, got: float, expected: float, tolerance: float, *, floor: float = 0.0, place: str = ""
) -> Measurement:
    """Compare two numbers: |got - expected| / max(|expected|, floor)."""
    got, expected = float(got), float(expected)
    error = 0.0 if got == expected else abs(got - expected) / max(abs(expected), floor, 1e-30)
    return Measurement(quantity, error, tolerance, got, expected, place)


def errors_of(got: Tensor, expected: Tensor) -> Tensor:
    """Return the error of each element relative to max(1, |expected|), in float64."""
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    errors = (got - expected).abs() / expected.abs().clamp(min=1.0)
    return errors.masked_fill(errors.isnan(), math.inf).masked_fill(got == expected, 0.0)


def values(quantity: str, got: Tensor, expected: Tensor, tolerance: float) -> Measurement:
    """Compare tensors of the same shape element by element; different shapes are a failure."""
    require_shape(quantity, got, expected)
    if not expected.numel():
        return Measurement(quantity, 0.0, tolerance, 0.0, 0.0)
    errors = errors_of(got, expected)
    place = _place(int(errors.argmax()), errors)
    return Measurement(quantity, float(errors[place]), tolerance, float(got[place]), float(expected[place]), str(place))


def norm(quantity: str, got: Tensor, expected: Tensor, tolerance: float, floor: float = 0.0) -> Measurement:
    """Compare tensors as a whole: |got - expected| / max(|expected|, floor) in L2 norms."""
    require_shape(quantity, got, expected)
    got, expected = got.detach().double().cpu(), expected.detach().double().cpu()
    size = float(expected.norm())
    difference = float((got - expected).norm())
    error = 0.0 if difference == 0.0 else difference / max(size, floor, 1e-30)
    return Measurement(quantity, error, tolerance, float(got.norm()), size, "L2 norm")


def whole(quantity: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> Measurement:
    """Compare all tensors as one vector; differing names or shapes and an empty expectation are failures."""
    require_names(quantity, got, expected)
    if not any(tensor.numel() for tensor in expected.values()):
        raise ConformanceFailure(f"{quantity}: nothing to compare, because no expected tensor has an element")
    for name, tensor in expected.items():
        require_shape(f"{quantity}: {name}", got[name], tensor)
    squares = sum(float((got[name].double() - expected[name].double()).square().sum()) for name in expected)
    total = sum(float(tensor.double().square().sum()) for tensor in expected.values())
    size = sum(float(tensor.double().square().sum()) for tensor in got.values())
    error = math.sqrt(squares) / max(math.sqrt(total), 1e-30)
    return Measurement(quantity, error, tolerance, math.sqrt(size), math.sqrt(total), "L2 norm of all tensors")


def exact(quantity: str, got: Tensor, expected: Tensor) -> Measurement:
    """Require equal values without tolerance (NaN equals NaN, and 0.0 equals -0.0) and equal dtypes."""
    import torch

    require_shape(quantity, got, expected)
    if got.dtype != expected.dtype:
        raise ConformanceFailure(f"{quantity} has dtype {got.dtype}; it must be {expected.dtype}")
    same = (got == expected) | (got != got) & (expected != expected)
    if bool(torch.all(same)):
        return Measurement(quantity, 0.0, 0.0, 0.0, 0.0)
    place = _place(int((~same).int().argmax()), same)
    left, right = float(got[place]), float(expected[place])
    return Measurement(quantity, max(abs(left - right), 5e-324), 0.0, left, right, str(place))


def _place(worst: int, of: Tensor) -> tuple[int, ...]:
    """Return the index of the element number `worst` of a tensor."""
    import torch

    return tuple(int(index) for index in torch.unravel_index(torch.tensor(worst), of.shape))


def require_shape(quantity: str, got: Tensor, expected: Tensor) -> None:
    """Raise a `ConformanceFailure` unless the shapes are equal."""
    if tuple(got.shape) != tuple(expected.shape):
        raise ConformanceFailure(f"{quantity} has shape {tuple(got.shape)}; it must be {tuple(expected.shape)}")


def require_names(quantity: str, got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise a `ConformanceFailure` unless the keys are equal."""
    missing, extra = sorted(expected.keys() - got.keys()), sorted(got.keys() - expected.keys())
    if missing or extra:
        raise ConformanceFailure(f"{quantity}: missing {missing or 'none'}, unexpected {extra or 'none'}")


def describe(measurement: Measurement, contract: int, who: str) -> str:
    """Return the text of a failure: both numbers, the tolerance and the contract."""
    place = f" at {measurement.place}" if measurement.place else ""
    allowed = "equal values" if measurement.tolerance == 0 else f"{measurement.tolerance:.3g}"
    return (
        f"{measurement.quantity} is wrong{place}\n"
        f"  got       {measurement.got:.9g}  ({who})\n"
        f"  expected  {measurement.expected:.9g}\n"
        f"  error     {measurement.error:.3g}, allowed {allowed}\n"
        f"  contract  {contract}: {CONTRACTS[contract]}"
    )


NOT_WRITTEN = re.compile(r"NotImplementedError: (.+)(\n  in        .+)?")
"""Finds what is not implemented, and the line with its place, in the text of an error."""
_TO_CLASS = r"(?:[^:\n]|:(?! ))+"  # a colon belongs to it if no space follows: `module:Class`, `fe80::1`
_OF_WORKER = re.compile(rf"{_TO_CLASS} failed in {_TO_CLASS}: NotImplementedError: ")
_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (\w+)', re.MULTILINE)


def not_written(error: BaseException) -> str:
    """Return what is not implemented yet, if `error` is a `NotImplementedError` of this process or of a worker.

    `NotSupported`, which says that something will not be, is another class. The place in the code is appended; an error
    without a message is named after the function.
    """
    if type(error) is NotImplementedError:
        text = "".join(traceback.format_exception(error))
    elif isinstance(error, WorkerError) and _OF_WORKER.match(str(error)):
        text = str(error)
    else:
        return ""
    file, line, function = _FRAME.findall(text)[-1]
    what = [found[1] for found in NOT_WRITTEN.finditer(text)] or [function]
    return f"NotImplementedError: {what[-1]}\n  in        {file}:{line}, {function}"
