"""The subjects of parity and its outcomes; `Divergence` is the first difference beyond tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlframework.conformance.layouts import Layout
from rlframework.conformance.measure import Measurement

if TYPE_CHECKING:
    from torch import Tensor

LOGPROBS, MEAN, LOSS, NORM, WEIGHTS, UPDATE, TENSOR = QUANTITIES = (
    "log-probabilities", "mean of log-probabilities", "loss", "gradient norm", "weights", "update", "tensor",
)  # fmt: skip
"""What is measured, in the order of the table. `TENSOR`: the tensor that is farthest off.

`UPDATE`: what a tensor was moved by in the first step, or all together in all steps, whichever is farthest off.
"""


AFTER_STEPS = 1e-4
"""fp32: loss and gradient norm of steps after the first, which are of weights that may have parted a little already."""


Steps = Sequence[tuple[float, float]]

LOADED = "weights as loaded"


@dataclass(frozen=True)
class Subject:
    """A backend in a layout, a precision and on a device. `mutant`: one of the suite's, to try parity itself.

    `keys`: of the backend's own section, as words that `parse_section` reads.
    """

    backend: str
    layout: Layout = field(default_factory=Layout)
    precision: str = "float32"
    device: str = "cpu"
    mutant: str | None = None
    keys: tuple[str, ...] = ()

    @property
    def how(self) -> str:
        """The layout, and the keys behind it, as on the command line."""
        return "/".join((str(self.layout), *self.keys))

    def __str__(self) -> str:
        mutant = f" as mutant {self.mutant}" if self.mutant else ""
        return f"{self.backend}:{self.how} {self.precision}{mutant}"


@dataclass(frozen=True)
class Seen:
    """What a backend computed: log-probabilities of each batch, then loss and norm of each step."""

    logprobs: Sequence[Tensor]
    steps: Steps


@dataclass(frozen=True)
class Divergence:
    """The first thing that is beyond its tolerance, `step` 0 being before the first one, and the first tensor that is.

    "First" among tensors is in the model's order. `tensors` of `of` are beyond in that step. No tensor: none was.
    """

    quantity: str
    step: int
    measurement: Measurement
    tensor: str = ""
    tensor_step: int = 0
    tensor_error: float = 0.0
    tensors: int = 0
    of: int = 0

    def __str__(self) -> str:
        if self.quantity in (LOADED, WEIGHTS):
            return f"the {self.quantity} part first: {self._of_tensor()}"
        found = self.measurement
        text = f"the {self.quantity} part{'s' * (self.quantity != LOGPROBS)} first, {_when(self.step)}: "
        text += (
            f"{found.got:.9g} instead of {found.expected:.9g} (error {found.error:.2g}, allowed {found.tolerance:g})"
        )
        return f"{text}; the first tensor that parts: {self._of_tensor() if self.tensor else 'none does'}"

    def _of_tensor(self) -> str:
        what = "what it has moved by" if self.tensor_step else "what was loaded"
        return (
            f"{self.tensor}, {_when(self.tensor_step)} ({what} is {self.tensor_error:.2g} off; {self.tensors} of "
            f"{self.of} tensors part there)"
        )


def _when(step: int) -> str:
    return f"in step {step}" if step else "before the first step"


@dataclass(frozen=True)
class Outcome:
    """What came of one subject in one exam. `reason`: why there are no figures, or why they are of no use.

    `error`: whether that is a failure, rather than something that is not there. `made`: whether there is a backend that
    could be asked. `against_run`: how far the subject is from what a recorded run itself saw.
    """

    subject: Subject
    exam: str
    measurements: Mapping[str, Measurement] = field(default_factory=dict)
    reason: str = ""
    error: bool = False
    made: bool = True
    divergence: Divergence | None = None
    against_run: Mapping[str, Measurement] = field(default_factory=dict)
    seconds: float = 0.0
    is_run: bool = False
    seen: Seen | None = field(default=None, repr=False, compare=False)

    @property
    def judged(self) -> tuple[str, ...]:
        """The quantities that have a verdict."""
        return tuple(name for name in self.measurements if self.subject.precision == "float32" or name == MEAN)

    @property
    def beyond(self) -> list[str]:
        """Those that are beyond their tolerance."""
        return [name for name in self.judged if not self.measurements[name].holds]

    @property
    def verdict(self) -> str:
        """In a word or two."""
        if self.reason and not self.measurements:
            return "failed" if self.error else "not available"
        return "beyond" if self.beyond else "agrees"

    @property
    def fails(self) -> bool:
        """Whether it makes the command fail: only fp32 decides, and what breaks."""
        return self.error or (bool(self.beyond) and self.subject.precision == "float32")
