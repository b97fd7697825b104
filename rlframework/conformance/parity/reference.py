"""What each backend must compute, and the oracle's answers: log-probabilities, then one optimizer step a batch."""

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

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from rlframework.interfaces.loss import LossFunction

LOSSES = ("nll", "pg")
"""Losses that the oracle has formulas of its own for: negative log-likelihood, clipped policy gradient."""

TEMPERATURE = 0.8
"""Of sampling, in `made_exam`: at 1 a temperature that is forgotten would not show."""

LR = 1e-4
"""Learning rate that the tolerances of the weights are for."""

ELEMENTS = 2**26
"""Logits that the oracle holds at once in a step with somebody else's loss."""

Take = Callable[[Oracle, BatchedDataDict[Any]], tuple[float, float]]
"""One step of the oracle on a batch: the loss before it, and the gradient's norm before clipping."""


@dataclass(frozen=True)
class Exam:
    """`batches`: one an optimizer step, at learning rate `lr`. `settings`: other keys of `policy`; `sections`: the
    keys that only one backend has, by its name.

    `floor`: losses are compared relative to at least this, where they may be small differences of large numbers.
    """

    name: str
    model: Path | str
    batches: Sequence[BatchedDataDict[Any]]
    loss: LossFunction
    take: Take
    lr: float = LR
    temperature: float = 1.0
    optimizer: Mapping[str, Any] = field(default_factory=dict)
    max_grad_norm: float | None = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    sections: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    floor: float = 0.0
    variant: str = ""
    """What `settings` ask for beyond the ordinary, in words."""

    def varied(self, variant: str, settings: Mapping[str, Any]) -> Exam:
        """The same, with the same answers, of a backend with other `settings`."""
        name = f"{self.name} {variant}".strip()
        other = replace(self, name=name, variant=variant, settings={**self.settings, **settings})
        vars(other)["answers"] = self.answers  # the oracle's do not hang on the settings
        return other

    def oracle(self) -> Oracle:
        """A fresh one."""
        return new_oracle(self.model, self.lr, self.temperature, self.max_grad_norm, self.optimizer)

    @cached_property
    def answers(self) -> Answers:
        """The oracle's, computed when they are first asked for."""
        oracle = self.oracle()
        logprobs = [scores(oracle, batch) for batch in self.batches]
        before = oracle.weights()
        steps: list[tuple[float, float]] = []
        gradients: dict[str, Tensor] = {}
        first: dict[str, Tensor] = {}
        for batch in self.batches:
            steps.append(self.take(oracle, batch))
            gradients, first = gradients or _gradients(oracle), first or oracle.weights()
        return Answers(logprobs, steps, Start.of(before, gradients), first, oracle.weights())

    @property
    def slack(self) -> float:
        """How much farther weights may part than after 20 steps at 1e-4: as many times as there is more to part by."""
        return max(1.0, len(self.batches) / 20) * max(1.0, self.lr / LR)


@dataclass(frozen=True)
class Answers:
    """Log-probabilities of each batch under the first weights; loss and norm of each step; the weights.

    `start`: before the first step, `first`: after it, `weights`: after all.
    """

    logprobs: list[Tensor]
    steps: list[tuple[float, float]]
    start: Start
    first: dict[str, Tensor]
    weights: dict[str, Tensor]


def _gradients(oracle: Oracle) -> dict[str, Tensor]:
    """Those of the step that was taken last; nothing where there is none, or none that made a step."""
    known = {name: parameter.grad for name, parameter in oracle.model.named_parameters()}
    found = {name: gradient.clone() for name, gradient in known.items() if gradient is not None}
    usable = all(bool(gradient.isfinite().all()) for gradient in found.values())
    return found if usable and any(bool(gradient.any()) for gradient in found.values()) else {}


def new_oracle(
    model: Path | str, lr: float, temperature: float, max_grad_norm: float | None, optimizer: Mapping[str, Any]
) -> Oracle:
    """An oracle with the settings of an exam. `optimizer`: betas, eps and weight decay, where they are not its own."""
    try:
        return Oracle(model, lr=lr, temperature=temperature, max_grad_norm=max_grad_norm, **optimizer)
    except (OSError, ValueError, SafetensorError) as error:
        raise DataError(f"{model} cannot be loaded as a causal language model for the oracle: {error}") from error


def made_exam(kind: str, model: Path | str, *, steps: int, rows: int, vocabulary: int | None = None) -> Exam:
    """Batches made at random, on which `kind` of `LOSSES` is trained. The oracle computes with formulas of its own."""

    def take(oracle: Oracle, batch: BatchedDataDict[Any]) -> tuple[float, float]:
        step = oracle.step(batch, kind)
        return step.loss, step.grad_norm

    batches = [cases.batch(rows, seed=seed, vocabulary=vocabulary) for seed in range(steps)]
    if kind == "pg":
        oracle = new_oracle(model, LR, TEMPERATURE, 1.0, {})
        batches = list(_with_prev_logprobs(oracle, batches, take))
    loss: LossFunction = NLLLoss() if kind == "nll" else ClippedPGLoss(ClippedPGLossConfig())
    return Exam(kind, model, batches, loss, take, temperature=TEMPERATURE)


def _with_prev_logprobs(
    oracle: Oracle, batches: Sequence[BatchedDataDict[Any]], take: Take
) -> Iterator[BatchedDataDict[Any]]:
    """Near those of the policy of the same step, as in a run: else all ratios would be clipped after some steps."""
    for seed, raw in enumerate(batches):
        batch = cases.with_prev_logprobs(raw, oracle.logprobs(raw), seed)
        take(oracle, batch)
        yield batch


# -- the oracle with somebody else's loss, some rows at a time --------------------------------------------------------


def scores(oracle: Oracle, batch: BatchedDataDict[Any]) -> Tensor:
    """`[B, S]`: the log-probabilities of a batch of any size."""
    return torch.cat([oracle.logprobs(part) for part in _parts(oracle, batch)])


def taking(loss: LossFunction) -> Take:
    """A step with `loss` itself on the oracle's log-probabilities, so that engines alone are compared.

    By the contract of losses the sum over parts of a batch is that of the batch. A batch without valid tokens, and a
    gradient that is not finite, make no step.
    """

    def take(oracle: Oracle, batch: BatchedDataDict[Any]) -> tuple[float, float]:
        mask = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:].float()
        tokens, sequences = mask.sum(), batch["sample_mask"].float().sum()
        if not tokens:
            return 0.0, 0.0
        oracle.model.zero_grad()
        total = sum(_backward(oracle, part, loss, sequences, tokens) for part in _parts(oracle, batch))
        gradients = [parameter.grad for parameter in oracle.model.parameters() if parameter.grad is not None]
        norm = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
        if torch.tensor(norm).isfinite():
            oracle.descend(total)
        return total, norm

    return take


def _backward(
    oracle: Oracle, part: BatchedDataDict[Any], loss: LossFunction, sequences: Tensor, tokens: Tensor
) -> float:
    """Add the gradient of some rows; their share of the loss."""
    wanted = (part["token_mask"] * part["sample_mask"][:, None])[:, 1:] != 0
    temperature = oracle.temperature if loss.at_sampling_temperature else 1.0
    logprobs = oracle.differentiable_logprobs(part, temperature)[:, 1:]
    if loss.wants_entropy:
        part = BatchedDataDict({**part, "entropy": oracle.entropy(part, temperature)[:, 1:] * wanted})
    value, _ = loss(torch.where(wanted, logprobs, 0.0), part, sequences, tokens)
    value.backward()
    return float(value.detach())


def _parts(oracle: Oracle, batch: BatchedDataDict[Any]) -> Iterator[BatchedDataDict[Any]]:
    vocabulary = oracle.model.get_output_embeddings().weight.shape[0]
    rows = max(1, ELEMENTS // (batch["input_ids"].shape[1] * vocabulary))
    for start in range(0, batch.size, rows):
        part: BatchedDataDict[Any] = batch.slice(start, min(start + rows, batch.size))
        yield part
