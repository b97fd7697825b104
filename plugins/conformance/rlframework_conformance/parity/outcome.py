"""Candidates of a comparison and its outcomes; `Divergence` is the first difference beyond tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rlframework_conformance.layouts import Layout
from rlframework_conformance.measure import Measurement

if TYPE_CHECKING:
    from torch import Tensor

LOGPROBS, MEAN, LOSS, NORM, WEIGHTS, UPDATE, TENSOR = QUANTITIES = (
    "log-probabilities", "mean of log-probabilities", "loss", "gradient norm", "weights", "update", "tensor",
)  # fmt: skip
"""Measured quantities, in the order of the report.

`TENSOR` is the tensor with the largest error. `UPDATE` is the worst of each tensor's update in the first step and of
the update of all tensors together over all steps.
"""

AFTER_STEPS = 1e-4
"""fp32 tolerance of loss and gradient norm after the first step, when the weights may already differ slightly."""


Steps = Sequence[tuple[float, float]]

LOADED = "weights as loaded"


@dataclass(frozen=True)
class Candidate:
    """A backend with a layout, a precision and a device.

    `keys`: keys of the backend's own section, in the form read by `parse_section`. `mutant`: a mutant of the
    conformance suite, to test parity itself.
    """

    backend: str
    layout: Layout = field(default_factory=Layout)
    precision: str = "float32"
    device: str = "cpu"
    mutant: str | None = None
    keys: tuple[str, ...] = ()

    @property
    def layout_and_keys(self) -> str:
        """The layout and the keys after it, as on the command line."""
        return "/".join((str(self.layout), *self.keys))

    def __str__(self) -> str:
        mutant = f" as mutant {self.mutant}" if self.mutant else ""
        return f"{self.backend}:{self.layout_and_keys} {self.precision}{mutant}"


@dataclass(frozen=True)
class Observed:
    """A backend's results: what its head returns for each batch, then loss and gradient norm of each step."""

    outputs: Sequence[Tensor]
    steps: Steps


@dataclass(frozen=True)
class Divergence:
    """The first quantity beyond its tolerance and the first tensor beyond its own.

    `step` 0 is before the first step. "First" among tensors is in the model's order; in that step `tensors` of `of`
    tensors are beyond tolerance. An empty `tensor` means that none is.
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
            return f"first divergence: {self.quantity}, {self._of_tensor()}"
        found = self.measurement
        text = (
            f"first divergence: {self.quantity} {_when(self.step)}, {found.got:.9g} instead of {found.expected:.9g} "
            f"(error {found.error:.2g}, allowed {found.tolerance:g})"
        )
        return f"{text}; first diverging tensor: {self._of_tensor() if self.tensor else 'none'}"

    def _of_tensor(self) -> str:
        what = "update" if self.tensor_step else "loaded weight"
        return (
            f"{self.tensor} {_when(self.tensor_step)} (error of the {what} {self.tensor_error:.2g}; {self.tensors} of "
            f"{self.of} tensors diverge in this step)"
        )


def _when(step: int) -> str:
    return f"in step {step}" if step else "before the first step"


@dataclass(frozen=True)
class Outcome:
    """The outcome of one candidate on one scenario.

    `reason`: why figures are missing or unusable. `error`: whether that counts as a failure. `built`: whether the
    backend could be built. `against_run`: differences from a recorded run's own figures.
    """

    candidate: Candidate
    scenario: str
    measurements: Mapping[str, Measurement] = field(default_factory=dict)
    reason: str = ""
    error: bool = False
    built: bool = True
    divergence: Divergence | None = None
    against_run: Mapping[str, Measurement] = field(default_factory=dict)
    seconds: float = 0.0
    is_run: bool = False
    observed: Observed | None = field(default=None, repr=False, compare=False)

    @property
    def checked(self) -> tuple[str, ...]:
        """The quantities that are checked against a tolerance."""
        return tuple(name for name in self.measurements if self.candidate.precision == "float32" or name == MEAN)

    @property
    def beyond(self) -> list[str]:
        """The checked quantities beyond their tolerance."""
        return [name for name in self.checked if not self.measurements[name].holds]

    @property
    def verdict(self) -> str:
        """The verdict in one or two words."""
        if self.reason and not self.measurements:
            refused = "rejected" if self.error else "not available"
            return refused if not self.built else "failed"
        return "beyond" if self.beyond else "agrees"

    @property
    def fails(self) -> bool:
        """Whether the outcome makes the command fail: a difference in fp32, or an error in any precision."""
        return self.error or (bool(self.beyond) and self.candidate.precision == "float32")
