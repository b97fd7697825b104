"""The argument of every suite test: the implementation under test, and methods to measure and to require."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlframework.plugins.types import Record
from rlframework_conformance import measure
from rlframework_conformance.contracts import CONTRACTS, FP32
from rlframework_conformance.layouts import Layout
from rlframework_conformance.measure import ConformanceFailure, Measurement, MutantNotApplicable, not_written

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.plugins.manager import PluginManager


Result = TypeVar("Result")


@dataclass
class Harness:
    """One per test. `contract` is the number of the test's contract; `folder` is empty and used by this test only.

    `target` is the class under test if it is not the record's; `section` holds keys of the plugin's own section.
    """

    record: Record
    layout: Layout
    manager: PluginManager
    device: str
    folder: Path
    models: Path
    contract: int = 1
    target: type | None = None
    mutant: str | None = None
    section: Mapping[str, Any] = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    """Kinds of models that the implementation rejects, which the verdict names."""
    resources: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Release the resources of the test."""
        self.resources.close()

    @property
    def description(self) -> str:
        """Describe the implementation under test, for messages."""
        mutant = f" as mutant {self.mutant}" if self.mutant else ""
        return f"{self.record.name}, {self.layout}, {self.device}{mutant}"

    def load_class(self) -> Any:
        """Return the class under test."""
        return self.target if self.target is not None else self.manager.load(self.record)

    # -- measuring ----------------------------------------------------------------------------------------------------

    def scalar(self, quantity: str, got: Any, expected: Any, tolerance: float = FP32) -> None:
        """Compare a number with the correct one; see `measure.scalar`."""
        self._note(measure.scalar(quantity, float(got), float(expected), tolerance))

    def values(self, quantity: str, got: Tensor, expected: Tensor, tolerance: float = FP32) -> None:
        """Compare tensors element by element."""
        self._note(measure.values(quantity, got, expected, tolerance))

    def norm(self, quantity: str, got: Tensor, expected: Tensor, tolerance: float = FP32, floor: float = 0.0) -> None:
        """Compare tensors as a whole, by L2 norm."""
        self._note(measure.norm(quantity, got, expected, tolerance, floor))

    def exact(self, quantity: str, got: Tensor, expected: Tensor) -> None:
        """Require equal values without tolerance, and equal dtypes."""
        self._note(measure.exact(quantity, got, expected))

    def same(self, when: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Require each of the tensors `expected` to be equal in `got`, as by `exact`; `when` follows their names."""
        for name, tensor in expected.items():
            self.exact(f"{name} {when}", got[name], tensor)

    def tensors(
        self, quantity: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor], whole: float, each: float
    ) -> None:
        """Compare named tensors: all as one vector within `whole`, and each within `each`."""
        self._note(measure.whole(f"{quantity} as a whole", got, expected, whole))
        each_error = [measure.norm(f"{quantity} of {name}", got[name], expected[name], each) for name in expected]
        self._note(max(each_error, key=lambda found: found.error))

    def _note(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        if not measurement.holds:
            raise ConformanceFailure(measure.describe(measurement, self.contract, self.description))

    # -- requiring ----------------------------------------------------------------------------------------------------

    def require(self, condition: Any, what: str, *, got: Any = None, expected: Any = None) -> None:
        """Raise a `ConformanceFailure` stating the requirement `what` unless `condition` is true."""
        if not condition:
            raise self._failure(what, got, expected)

    def equal(self, what: str, got: Any, expected: Any) -> None:
        """Require two plain values to be equal."""
        self.require(got == expected, what, got=got, expected=expected)

    def must_not_raise(self, what: str, call: Callable[[], Result], *allowed: type[Exception]) -> Result:
        """Return the result of `call`; any exception not in `allowed` is a failure."""
        try:
            return call()
        except Exception as error:
            if isinstance(error, (ConformanceFailure, *allowed)):
                raise
            got = f"{type(error).__name__}: {error}"
            raise self._failure(f"{what} must not raise", got, "no error") from error

    def raises(
        self,
        error: type[BaseException] | tuple[type[BaseException], ...],
        call: Callable[[], Any],
        what: str,
        match: str = "",
    ) -> BaseException:
        """Require `call` to raise `error` with a message matching the pattern `match`; return the exception."""
        names = " or ".join(kind.__name__ for kind in (error if isinstance(error, tuple) else (error,)))
        try:
            call()
        except (ConformanceFailure, MutantNotApplicable):
            raise
        except error as raised:
            message = str(raised)
            if re.search(match, message, re.DOTALL | re.IGNORECASE):
                return raised
            requirement = f"{what}: the message of the {type(raised).__name__} must match {match!r}"
            raise self._failure(requirement, message[:500], match) from raised
        except Exception as other:
            if not_written(other):
                raise
            got = f"{type(other).__name__}: {str(other)[:500]}"
            raise self._failure(f"{what} must raise {names}", got, names) from other
        raise self._failure(f"{what} must raise {names}", "no error", names)

    def _failure(self, what: str, got: Any, expected: Any) -> ConformanceFailure:
        numbers = "" if got is None and expected is None else f"\n  got       {got!r}\n  expected  {expected!r}"
        return ConformanceFailure(
            f"does not hold: {what}{numbers}\n  by        {self.description}\n"
            f"  contract  {self.contract}: {CONTRACTS[self.contract]}"
        )
