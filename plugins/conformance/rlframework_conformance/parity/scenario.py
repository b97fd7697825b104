"""Scenarios: a model, batches and a loss for every backend, and the oracle's results on them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError

from rlframework.algorithms.losses import ClippedPGLoss, NLLLoss
from rlframework.base.errors import DataError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework_conformance import cases
from rlframework_conformance.oracle import Oracle
from rlframework_conformance.parity.oracle_policy import OracleStepFunction, oracle_outputs
from rlframework_conformance.parity.update import Start

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rlframework.interfaces.loss import LossFunction

LOSSES = ("nll", "pg")
"""Losses with a formula in the oracle: negative log-likelihood and clipped policy gradient."""

TEMPERATURE = 0.8
"""Sampling temperature of `random_scenario`; at 1 a backend that ignores it would not be noticed."""

LR = 1e-4
"""Learning rate that the tolerances of weights are for."""


@dataclass(frozen=True)
class Scenario:
    """A training scenario with one optimizer step per batch at learning rate `lr`.

    `settings`: other keys of `policy`; `sections`: backends' own sections by name. `floor`: losses are compared
    relative to at least this value, for losses that are small differences of large numbers.
    """

    name: str
    model: Path | str
    batches: Sequence[BatchedDataDict[Any]]
    loss: LossFunction
    oracle_step: OracleStepFunction
    lr: float = LR
    temperature: float = 1.0
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    max_grad_norm: float | None = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    floor: float = 0.0
    variant: str = ""
    """Short description of non-default `settings`."""

    def with_settings(self, variant: str, settings: Mapping[str, Any]) -> Scenario:
        """Return the same scenario and answers for a backend with other `settings`."""
        name = f"{self.name} {variant}".strip()
        other = replace(self, name=name, variant=variant, settings={**self.settings, **settings})
        vars(other)["answers"] = self.answers  # the oracle's results do not depend on the settings
        return other

    @property
    def head(self) -> str:
        """The model's head, as `policy.head`."""
        return str(self.settings.get("head", "language"))

    def oracle(self) -> Oracle:
        """Create a new oracle."""
        head = None if self.head == "language" else self.settings.get("head_init", "checkpoint")
        return new_oracle(self.model, self.lr, self.temperature, self.max_grad_norm, self.optimizer, head)

    @cached_property
    def answers(self) -> Answers:
        """The oracle's results, computed on first use."""
        oracle = self.oracle()
        outputs = [oracle_outputs(oracle, batch, self.head) for batch in self.batches]
        before = oracle.weights()
        steps: list[tuple[float, float]] = []
        gradients: dict[str, Tensor] = {}
        first: dict[str, Tensor] = {}
        for batch in self.batches:
            steps.append(self.oracle_step(oracle, batch))
            gradients, first = gradients or _gradients(oracle), first or oracle.weights()
        return Answers(outputs, steps, Start.of(before, gradients), first, oracle.weights())

    @property
    def slack(self) -> float:
        """Factor on the tolerances of weights: proportional to steps beyond 20 and to the learning rate beyond 1e-4."""
        return max(1.0, len(self.batches) / 20) * max(1.0, self.lr / LR)


@dataclass(frozen=True)
class Answers:
    """Outputs of the head under the initial weights, loss and norm of each step, and weights.

    `outputs`: see `oracle_outputs`. `start`: before the first step, `first`: after it, `weights`: after all steps.
    """

    outputs: list[Tensor]
    steps: list[tuple[float, float]]
    start: Start
    first: dict[str, Tensor]
    weights: dict[str, Tensor]


def _gradients(oracle: Oracle) -> dict[str, Tensor]:
    """Return the gradients of the last step; empty if there are none or the step was skipped."""
    known = {name: parameter.grad for name, parameter in oracle.model.named_parameters()}
    found = {name: gradient.clone() for name, gradient in known.items() if gradient is not None}
    usable = all(bool(gradient.isfinite().all()) for gradient in found.values())
    return found if usable and any(bool(gradient.any()) for gradient in found.values()) else {}


def new_oracle(
    model: Path | str,
    lr: float,
    temperature: float,
    max_grad_norm: float | None,
    optimizer: Mapping[str, Any],
    head: str | None = None,
) -> Oracle:
    """Create an oracle with a scenario's settings. `optimizer`: betas, eps and weight decay, if not the defaults.

    `head`: see `Oracle`.
    """
    try:
        return Oracle(model, lr=lr, temperature=temperature, max_grad_norm=max_grad_norm, head=head, **optimizer)
    except (OSError, ValueError, SafetensorError) as error:
        kind = "causal language model" if head is None else "model with one number per token"
        raise DataError(f"{model} cannot be loaded as a {kind} for the oracle: {error}") from error


def random_scenario(kind: str, model: Path | str, *, steps: int, rows: int, vocabulary: int | None = None) -> Scenario:
    """Create a scenario of random batches with the loss `kind` of `LOSSES`; the oracle uses its own formula."""

    def oracle_step(oracle: Oracle, batch: BatchedDataDict[Any]) -> tuple[float, float]:
        step = oracle.step(batch, kind)
        return step.loss, step.grad_norm

    batches = [cases.batch(rows, seed=seed, vocabulary=vocabulary) for seed in range(steps)]
    if kind == "pg":
        oracle = new_oracle(model, LR, TEMPERATURE, 1.0, {})
        batches = list(_with_prev_logprobs(oracle, batches, oracle_step))
    loss: LossFunction = NLLLoss() if kind == "nll" else ClippedPGLoss(ClippedPGLossConfig())
    return Scenario(kind, model, batches, loss, oracle_step, temperature=TEMPERATURE)


def _with_prev_logprobs(
    oracle: Oracle, batches: Sequence[BatchedDataDict[Any]], oracle_step: OracleStepFunction
) -> Iterator[BatchedDataDict[Any]]:
    """Set `prev_logprobs` near the policy's at each step, as in a run; otherwise all ratios would soon be clipped."""
    for seed, raw in enumerate(batches):
        batch = cases.with_prev_logprobs(raw, oracle.logprobs(raw), seed)
        oracle_step(oracle, batch)
        yield batch
