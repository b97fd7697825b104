"""A backend beside the oracle: how far its log-probabilities, losses, gradient norms, weights and updates are from it.

A verdict needs a tolerance. In fp32 there is one for each quantity; in other precisions for the mean error of
log-probabilities alone: the largest grows with the number of tokens, and the rest has no bound that means something.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlframework.conformance import measure
from rlframework.conformance.contracts import BF16, FP32, TENSOR_AFTER_20_STEPS, WEIGHTS_AFTER_20_STEPS
from rlframework.conformance.layouts import Layout
from rlframework.conformance.measure import Measurement
from rlframework.conformance.parity.update import says_something
from rlframework.conformance.policies import DEADLINES, InspectedPolicy, run_config, weights_of
from rlframework.conformance.sections import merged, parse_section
from rlframework.data.tokenizer import load_tokenizer
from rlframework.errors import RLFrameworkError, UserError

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.conformance.parity.exam import Exam
    from rlframework.conformance.parity.parting import Parting
    from rlframework.plugins.manager import PluginManager

LOGPROBS, MEAN, LOSS, NORM, WEIGHTS, UPDATE, TENSOR = QUANTITIES = (
    "log-probabilities", "mean of log-probabilities", "loss", "gradient norm", "weights", "update", "tensor",
)  # fmt: skip
"""What is measured, in the order of the table. `TENSOR`: the tensor that is farthest off.

`UPDATE`: what a tensor was moved by in the first step, or all together in all steps, whichever is farthest off.
"""

AFTER_STEPS = 1e-4
"""fp32: loss and gradient norm of steps after the first, which are of weights that may have parted a little already."""

Steps = Sequence[tuple[float, float]]


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
    parting: Parting | None = None
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


def examine(exam: Exam, subject: Subject, *, manager: PluginManager, folder: Path, named: bool) -> Outcome:
    """Put `subject` through `exam`, and look for where it parts from the oracle if it does.

    `named`: somebody asked for this subject, so that it is an error where it cannot be made.
    """
    started = time.perf_counter()
    with ExitStack() as stack:
        try:
            policy = stack.enter_context(opened(exam, subject, manager))
        except UserError as error:
            return Outcome(subject, exam.name, reason=first_line(error), error=named, made=False)
        except Exception as error:  # noqa: BLE001 - a backend that breaks is told, and the others go on
            return Outcome(subject, exam.name, reason=first_line(error), error=True)
        try:
            outcome = _measured(exam, subject, policy, folder)
        except Exception as error:  # noqa: BLE001 - as above, and whatever it is: it could be made, so it should work
            return Outcome(subject, exam.name, reason=first_line(error), error=True)
    if outcome.fails:
        outcome = replace(outcome, parting=_parting(exam, subject, manager, folder))
    return replace(outcome, seconds=time.perf_counter() - started)


def _measured(exam: Exam, subject: Subject, policy: InspectedPolicy, folder: Path) -> Outcome:
    logprobs = [policy.get_logprobs(batch)["logprobs"] for batch in exam.batches]
    policy.prepare_for_training()
    steps = [step(policy, exam, batch) for batch in exam.batches[:1]]
    first = last = weights_of(policy, folder / "weights")
    if later := [step(policy, exam, batch) for batch in exam.batches[1:]]:
        steps, last = steps + later, weights_of(policy, folder / "weights")
    outcome = compared(exam, subject, logprobs, steps, (first, last))
    return replace(outcome, seen=Seen(logprobs, steps))


def _parting(exam: Exam, subject: Subject, manager: PluginManager, folder: Path) -> Parting | None:
    from rlframework.conformance.parity.parting import find_parting

    return find_parting(exam, subject, manager=manager, folder=folder)


@contextmanager
def opened(exam: Exam, subject: Subject, manager: PluginManager) -> Iterator[InspectedPolicy]:
    """The policy of `subject`, on the exam's model with a fresh optimizer."""
    section = merged(exam.sections.get(subject.backend, {}), parse_section(subject.keys))
    settings = {
        **({subject.backend: section} if section else {}),
        "train_global_batch_size": exam.batches[0].size,
        "max_grad_norm": exam.max_grad_norm,
        **exam.settings,
        "precision": subject.precision,
        "optimizer": {"lr": exam.lr, **exam.optimizer},
    }
    config = run_config(
        subject.backend,
        exam.model,
        subject.layout,
        manager=manager,
        device=subject.device,
        generation={"temperature": exam.temperature},
        deadlines={**DEADLINES, "call": 1800.0},
        **settings,
    )
    tokenizer = load_tokenizer(str(exam.model), config.policy.trust_remote_code)
    count = len(exam.batches)
    policy = InspectedPolicy(
        config, tokenizer, manager, device=subject.device, training_calls=count, mutant=subject.mutant
    )
    with policy:
        yield policy


def step(policy: InspectedPolicy, exam: Exam, batch: Any) -> tuple[float, float]:
    """One optimizer step: the loss before it, and the gradient's norm before clipping."""
    result = policy.train(batch, exam.loss, gbs=batch.size)
    return float(result["loss"]), float(result["grad_norm"][0])


def compared(
    exam: Exam,
    subject: Subject,
    logprobs: Sequence[Tensor],
    steps: Steps,
    weights: tuple[Mapping[str, Tensor], Mapping[str, Tensor]] | None,
) -> Outcome:
    """How far these are from the oracle's answers. Fewer batches or steps than the exam has are its first.

    `weights`: those after the first step and after all, where they are known.
    """
    answers = exam.answers
    pairs = list(enumerate(zip(steps, answers.steps[: len(steps)], strict=True), start=1))
    measurements = {
        **logprobs_measured(logprobs, answers.logprobs[: len(logprobs)]),
        LOSS: farthest([loss_measured(exam, number, got[0], want[0]) for number, (got, want) in pairs]),
        NORM: farthest([norm_measured(number, got[1], want[1]) for number, (got, want) in pairs]),
    }
    if weights is not None:
        measurements.update(_weights_measured(exam, *weights))
    return Outcome(subject, exam.name, measurements)


def _weights_measured(
    exam: Exam, first: Mapping[str, Tensor], last: Mapping[str, Tensor]
) -> Iterator[tuple[str, Measurement]]:
    answers, after = exam.answers, exam.answers.weights
    measure.require_names("the weights that save_pretrained wrote", last, after)
    yield WEIGHTS, measure.whole("weights", last, after, WEIGHTS_AFTER_20_STEPS * exam.slack)
    updates = [
        *answers.start.tensors(first, answers.first, 1),
        answers.start.whole(last, after, len(exam.batches)),
    ]
    if telling := [found for found in updates if says_something(found)]:
        yield UPDATE, farthest(telling)
    allowed = TENSOR_AFTER_20_STEPS * exam.slack
    yield TENSOR, farthest([measure.norm(name, last[name], after[name], allowed) for name in after])


def logprobs_measured(got: Sequence[Tensor], expected: Sequence[Tensor]) -> dict[str, Measurement]:
    """The farthest of all log-probabilities, and the mean error of those that are of a token."""
    pairs = list(zip(got, expected, strict=True))
    errors = torch.cat([_errors(*pair)[pair[1] != 0] for pair in pairs])
    mean = float(errors.mean()) if errors.numel() else 0.0
    return {
        LOGPROBS: farthest([measure.values(LOGPROBS, *pair, FP32) for pair in pairs]),
        MEAN: Measurement(MEAN, math.inf if math.isnan(mean) else mean, BF16, mean, 0.0, "mean of all errors"),
    }


def _errors(got: Tensor, expected: Tensor) -> Tensor:
    got, expected = got.double(), expected.double()
    return (got - expected).abs() / expected.abs().clamp(min=1.0)


def loss_measured(exam: Exam, number: int, got: float, expected: float) -> Measurement:
    """The loss of step `number`."""
    size = max(abs(expected), exam.floor, 1e-30)
    error = 0.0 if got == expected else abs(got - expected) / size
    tolerance = FP32 if number == 1 else AFTER_STEPS
    return Measurement(LOSS, math.inf if math.isnan(error) else error, tolerance, got, expected, f"step {number}")


def norm_measured(number: int, got: float, expected: float) -> Measurement:
    """The norm of the gradient of step `number`."""
    found = measure.scalar(NORM, got, expected, FP32 if number == 1 else AFTER_STEPS)
    return replace(found, place=f"step {number}")


def farthest(measurements: Sequence[Measurement]) -> Measurement:
    """The one with the largest error as a part of its tolerance; the first of several."""
    return max(measurements, key=lambda measurement: measurement.error / measurement.tolerance)


def first_line(error: BaseException) -> str:
    """The beginning of what an error says; of a worker's, the end of its traceback."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    text = lines[0] if not lines[0].endswith(":") else f"{lines[0]} {lines[-1]}"
    return text if isinstance(error, RLFrameworkError) else f"{type(error).__name__}: {text}"
