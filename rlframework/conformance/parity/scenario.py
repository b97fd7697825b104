"""Scenarios: a model, batches and a loss for every backend, and the oracle's results on them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from rlframework.algorithms.losses import ClippedPGLoss, NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.conformance import cases
from rlframework.conformance.oracle import Oracle
from rlframework.conformance.parity.update import Start
from rlframework.errors import DataError
from rlframework.interfaces.loss import needs_groups

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

ELEMENTS = 2**26
"""Number of logits that the oracle holds at a time in a step with a given loss function."""

OracleStepFunction = Callable[[Oracle, BatchedDataDict[Any]], tuple[float, float]]
"""Takes one step of the oracle on a batch; returns the loss before it and the gradient norm before clipping."""


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

    def oracle(self) -> Oracle:
        """Create a new oracle."""
        return new_oracle(self.model, self.lr, self.temperature, self.max_grad_norm, self.optimizer)

    @cached_property
    def answers(self) -> Answers:
        """The oracle's results, computed on first use."""
        oracle = self.oracle()
        logprobs = [scores(oracle, batch) for batch in self.batches]
        before = oracle.weights()
        steps: list[tuple[float, float]] = []
        gradients: dict[str, Tensor] = {}
        first: dict[str, Tensor] = {}
        for batch in self.batches:
            steps.append(self.oracle_step(oracle, batch))
            gradients, first = gradients or _gradients(oracle), first or oracle.weights()
        return Answers(logprobs, steps, Start.of(before, gradients), first, oracle.weights())

    @property
    def slack(self) -> float:
        """Factor on the tolerances of weights: proportional to steps beyond 20 and to the learning rate beyond 1e-4."""
        return max(1.0, len(self.batches) / 20) * max(1.0, self.lr / LR)


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of each batch under the initial weights, loss and norm of each step, and weights.

    `start`: before the first step, `first`: after it, `weights`: after all steps.
    """

    logprobs: list[Tensor]
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
    model: Path | str, lr: float, temperature: float, max_grad_norm: float | None, optimizer: Mapping[str, Any]
) -> Oracle:
    """Create an oracle with a scenario's settings. `optimizer`: betas, eps and weight decay, if not the defaults."""
    try:
        return Oracle(model, lr=lr, temperature=temperature, max_grad_norm=max_grad_norm, **optimizer)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{model} cannot be loaded as a causal language model for the oracle: {error}") from error


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


# -- the oracle with a given loss function, some rows at a time -------------------------------------------------------


def scores(oracle: Oracle, batch: BatchedDataDict[Any]) -> Tensor:
    """Return the log-probabilities of a batch of any size, `[B, S]`."""
    return torch.cat([oracle.logprobs(rows) for rows in _row_slices(oracle, batch)])


def oracle_step_with(loss: LossFunction) -> OracleStepFunction:
    """Return a step function that applies `loss` to the oracle's log-probabilities, so only engines are compared.

    By the contract of losses, the sum over shards of a batch equals the loss of the batch, if groups stay whole. A
    batch without valid tokens and a non-finite gradient take no step.
    """

    def oracle_step(oracle: Oracle, batch: BatchedDataDict[Any]) -> tuple[float, float]:
        mask = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:].float()
        tokens, sequences = mask.sum(), batch["sample_mask"].float().sum()
        if not tokens:
            return 0.0, 0.0
        oracle.model.zero_grad()
        slices = [batch] if needs_groups(loss) else _row_slices(oracle, batch)
        total = sum(_backward(oracle, rows, loss, sequences, tokens) for rows in slices)
        gradients = [parameter.grad for parameter in oracle.model.parameters() if parameter.grad is not None]
        norm = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
        if torch.tensor(norm).isfinite():
            oracle.descend(total)
        return total, norm

    return oracle_step


def _backward(
    oracle: Oracle, rows: BatchedDataDict[Any], loss: LossFunction, sequences: Tensor, tokens: Tensor
) -> float:
    """Add the gradient of some rows and return their share of the loss."""
    wanted = (rows["token_mask"] * rows["sample_mask"][:, None])[:, 1:] != 0
    temperature = oracle.temperature if loss.at_sampling_temperature else 1.0
    logprobs = oracle.differentiable_logprobs(rows, temperature)[:, 1:]
    if loss.wants_entropy:
        rows = BatchedDataDict({**rows, "entropy": oracle.entropy(rows, temperature)[:, 1:] * wanted})
    value, _ = loss(torch.where(wanted, logprobs, 0.0), rows, sequences, tokens)
    value.backward()
    return float(value.detach())


def _row_slices(oracle: Oracle, batch: BatchedDataDict[Any]) -> Iterator[BatchedDataDict[Any]]:
    vocabulary = oracle.model.get_output_embeddings().weight.shape[0]
    count = max(1, ELEMENTS // (batch["input_ids"].shape[1] * vocabulary))
    for start in range(0, batch.size, count):
        rows: BatchedDataDict[Any] = batch.slice(start, min(start + count, batch.size))
        yield rows
