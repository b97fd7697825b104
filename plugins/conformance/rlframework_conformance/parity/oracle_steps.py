"""The oracle with the framework's own losses: its outputs, and optimizer steps, some rows of a batch at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.loss import LossInput, needs_groups
from rlframework_conformance.oracle import Oracle

if TYPE_CHECKING:
    from rlframework.interfaces.loss import LossFunction

ELEMENTS = 2**26
"""Number of logits that the oracle holds at a time."""

Batch = BatchedDataDict[Any]

OracleStepFunction = Callable[[Oracle, Batch], tuple[float, float]]
"""Takes one step of the oracle on a batch; returns the loss before it and the gradient norm before clipping."""


def oracle_outputs(oracle: Oracle, batch: Batch, head: str = "language") -> Tensor:
    """Return what a policy with this `head` returns for a batch of any size.

    That is `get_logprobs` (language) and `get_values` (value), `[B, S]`, or `score` (score), `[B]`.
    """
    reads = {"language": LossInput.LOGPROBS, "value": LossInput.VALUES, "score": LossInput.SCORES}[head]
    with torch.no_grad():
        return torch.cat([_values(oracle, rows, reads, oracle.temperature) for rows in _row_slices(oracle, batch)])


def oracle_step_with(loss: LossFunction) -> OracleStepFunction:
    """Return a step function that applies `loss` to the oracle's outputs, so only engines are compared.

    By the contract of losses, the sum over shards of a batch equals the loss of the batch, if groups stay whole. A
    batch without valid tokens and a non-finite gradient take no step.
    """

    def oracle_step(oracle: Oracle, batch: Batch) -> tuple[float, float]:
        mask = (batch["token_mask"] * batch["sample_mask"][:, None])[:, 1:].float()
        tokens, sequences = mask.sum(), batch["sample_mask"].float().sum()
        if not tokens:
            return 0.0, 0.0
        oracle.model.zero_grad()
        slices = [batch] if needs_groups(loss) else _row_slices(oracle, batch)
        total = 0.0
        for rows in slices:
            value, _ = oracle_loss(oracle, rows, loss, sequences, tokens)
            value.backward()
            total += float(value.detach())
        gradients = [parameter.grad for parameter in oracle.model.parameters() if parameter.grad is not None]
        norm = float(torch.stack([gradient.square().sum() for gradient in gradients]).sum().sqrt())
        if torch.tensor(norm).isfinite():
            oracle.descend(total)
        return total, norm

    return oracle_step


def oracle_loss(
    oracle: Oracle, rows: Batch, loss: LossFunction, sequences: Tensor, tokens: Tensor
) -> tuple[Tensor, dict[str, Any]]:
    """Return the share of `rows` in the loss, with gradient, and in its metrics.

    `sequences`, `tokens`: the valid ones of the global batch.
    """
    wanted = (rows["token_mask"] * rows["sample_mask"][:, None])[:, 1:] != 0
    temperature = oracle.temperature if loss.at_sampling_temperature else 1.0
    values = _values(oracle, rows, loss.input_type, temperature)
    if loss.input_type == LossInput.SCORES:
        values = values * (rows["sample_mask"] != 0)
    else:
        values = values[:, 1:].where(wanted if values.dim() == 2 else wanted[..., None], 0.0)
    if loss.wants_entropy:
        differentiable = getattr(loss, "entropy_gradient", False)
        entropy = (oracle.differentiable_entropy if differentiable else oracle.entropy)(rows, temperature)
        rows = BatchedDataDict({**rows, "entropy": entropy[:, 1:] * wanted})
    return loss(values, rows, sequences, tokens)


def _values(oracle: Oracle, rows: Batch, reads: LossInput, temperature: float) -> Tensor:
    """Return what a loss with this input reads of whole rows, with an entry for position 0, which is 0."""
    if reads == LossInput.SCORES:
        return oracle.last_values(rows)
    if reads == LossInput.VALUES:
        real = torch.arange(rows["input_ids"].shape[1]) < rows["input_lengths"][:, None]
        before: Tensor = torch.nn.functional.pad(oracle.values(rows)[:, :-1], (1, 0)) * real
        return before
    logprobs = oracle.differentiable_logprobs(rows, temperature)
    if reads == LossInput.LOGPROBS:
        return logprobs
    return torch.cat((logprobs[..., None], oracle.differentiable_set_logprobs(rows, temperature)), -1)


def _row_slices(oracle: Oracle, batch: Batch) -> Iterator[Batch]:
    head = oracle.model.get_output_embeddings()
    outputs = 1 if head is None else head.weight.shape[0]
    count = max(1, ELEMENTS // (batch["input_ids"].shape[1] * outputs))
    for start in range(0, batch.size, count):
        rows: Batch = batch.slice(start, min(start + count, batch.size))
        yield rows
