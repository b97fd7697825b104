"""What a test of a suite works with: the part under test, and ways to measure and to require."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.conformance import measure
from rlframework.conformance.contracts import CONTRACTS, FP32
from rlframework.conformance.layouts import Layout
from rlframework.conformance.measure import ConformanceFailure, Measurement
from rlframework.plugins.types import Record

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.plugins.manager import PluginManager


@dataclass
class Bench:
    """One test's own. `contract` is the number of the contract that it is of; `folder` is empty and its own.

    `target` is the class under test where that is not the record's; `section` holds keys of the part's own section.
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
    resources: ExitStack = field(default_factory=ExitStack)

    def close(self) -> None:
        """Let go of what the test made."""
        self.resources.close()

    @property
    def who(self) -> str:
        """The part under test, for messages."""
        mutant = f" as mutant {self.mutant}" if self.mutant else ""
        return f"{self.record.name}, {self.layout}, {self.device}{mutant}"

    def part(self) -> Any:
        """The class under test."""
        return self.target if self.target is not None else self.manager.load(self.record)

    # -- measuring ----------------------------------------------------------------------------------------------------

    def scalar(self, quantity: str, got: Any, expected: Any, tolerance: float = FP32) -> None:
        """One number against the right one: see `measure.scalar`."""
        self._note(measure.scalar(quantity, float(got), float(expected), tolerance))

    def values(self, quantity: str, got: Tensor, expected: Tensor, tolerance: float = FP32) -> None:
        """Tensors element by element."""
        self._note(measure.values(quantity, got, expected, tolerance))

    def norm(self, quantity: str, got: Tensor, expected: Tensor, tolerance: float = FP32, floor: float = 0.0) -> None:
        """A tensor as a whole."""
        self._note(measure.norm(quantity, got, expected, tolerance, floor))

    def exact(self, quantity: str, got: Tensor, expected: Tensor) -> None:
        """Equal in value, without any tolerance, and in dtype."""
        self._note(measure.exact(quantity, got, expected))

    def tensors(
        self, quantity: str, got: Mapping[str, Tensor], expected: Mapping[str, Tensor], whole: float, each: float
    ) -> None:
        """Named tensors: all of them as one vector within `whole`, and each within `each`."""
        self._note(measure.whole(f"{quantity} as a whole", got, expected, whole))
        parts = [measure.norm(f"{quantity} of {name}", got[name], expected[name], each) for name in expected]
        self._note(max(parts, key=lambda part: part.error))

    def _note(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        if not measurement.holds:
            raise ConformanceFailure(measure.describe(measurement, self.contract, self.who))

    # -- requiring ----------------------------------------------------------------------------------------------------

    def require(self, condition: Any, what: str, *, got: Any = None, expected: Any = None) -> None:
        """A `ConformanceFailure` that says `what` must hold, unless `condition` does."""
        if not condition:
            raise self._failure(what, got, expected)

    def equal(self, what: str, got: Any, expected: Any) -> None:
        """Two plain values that must be equal."""
        self.require(got == expected, what, got=got, expected=expected)

    def refuses(
        self,
        error: type[BaseException] | tuple[type[BaseException], ...],
        call: Callable[[], Any],
        what: str,
        says: str = "",
    ) -> BaseException:
        """`call` must raise `error` with a message in which the pattern `says` is found; returns what it raised."""
        names = " or ".join(kind.__name__ for kind in (error if isinstance(error, tuple) else (error,)))
        try:
            call()
        except ConformanceFailure:
            raise
        except error as raised:
            told = str(raised)
            if re.search(says, told, re.DOTALL | re.IGNORECASE):
                return raised
            raise self._failure(f"{what}: the {type(raised).__name__} says {says!r}", told[:500], says) from raised
        except Exception as other:
            told = f"{type(other).__name__}: {str(other)[:500]}"
            raise self._failure(f"{what} is refused with {names}", told, names) from other
        raise self._failure(f"{what} is refused with {names}", "no error", names)

    def _failure(self, what: str, got: Any, expected: Any) -> ConformanceFailure:
        numbers = "" if got is None and expected is None else f"\n  got       {got!r}\n  expected  {expected!r}"
        return ConformanceFailure(
            f"does not hold: {what}{numbers}\n  by        {self.who}\n"
            f"  contract  {self.contract}: {CONTRACTS[self.contract]}"
        )
