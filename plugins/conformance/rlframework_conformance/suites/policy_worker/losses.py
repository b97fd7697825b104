"""Losses used only by the suite: of pairs, on scores, values or logits, with known metrics, not finite, or raising."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from rlframework.algorithms.losses import NLLLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.loss import LossInput

Batch = BatchedDataDict[Any]
Result = tuple[Tensor, dict[str, Any]]


def _mask(data: Batch) -> Tensor:
    """Return 1 at the tokens that count, without position 0, `[B, S-1]`."""
    mask: Tensor = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
    return mask


def _pairs(numbers: Tensor, data: Batch, rows: Tensor) -> Result:
    """Return minus the log-sigmoid of how much the number of a row exceeds that of the next of its group, summed."""
    ids = data["group_ids"]
    terms = -torch.nn.functional.logsigmoid(numbers[:-1] - numbers[1:]) * (ids[:-1] == ids[1:])
    return terms.sum() / rows, {}


class _Loss(NLLLoss):
    """A loss that `_value` computes; by default it is negative log-likelihood."""

    def __call__(
        self, next_token_logprobs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> Result:
        """See `LossFunction`."""
        return self._value(next_token_logprobs, data, global_valid_seqs, global_valid_toks)

    def _value(self, inputs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Result:
        return super().__call__(inputs, data, global_valid_seqs, global_valid_toks)


class MetricsLoss(_Loss):
    """Negative log-likelihood with metrics whose values for the whole batch are known."""

    def _value(self, inputs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Result:
        loss, _ = super()._value(inputs, data, global_valid_seqs, global_valid_toks)
        mask = _mask(data)
        advantages = data["advantages"][:, 1:]
        metrics: dict[str, Any] = {"advantage": (advantages * mask).sum() / global_valid_toks}
        if bool(mask.any()):
            metrics["advantage_min"] = advantages[mask > 0].min()
            metrics["advantage_max"] = advantages[mask > 0].max()
        return loss, metrics


class PairsLoss(_Loss):
    """The oracle's loss `pairs`, for rows of a group that follow each other."""

    needs_groups = True

    def _value(self, inputs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Result:
        mask = _mask(data)
        means = (inputs * mask).sum(1) / mask.sum(1).clamp(min=1.0)
        return _pairs(means, data, global_valid_seqs)


class SetsLoss(_Loss):
    """The oracle's loss `sets`; the first argument is `[B, S-1, 1 + K]`."""

    input_type = LossInput.TOKEN_SETS

    def _value(self, inputs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Result:
        weighted = (inputs[..., 1:] * data["set_weights"][:, 1:]).sum(-1)
        return super()._value(inputs[..., 0] + weighted, data, global_valid_seqs, global_valid_toks)


class ValuesLoss(_Loss):
    """The oracle's loss `values`; the first argument is `[B, S-1]`, the value before each token but the first."""

    input_type = LossInput.VALUES

    def _value(self, inputs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Result:
        mask = _mask(data)
        return ((inputs - data["advantages"][:, 1:]).square() * mask).sum() / global_valid_toks, {}


class ScoresLoss(_Loss):
    """The oracle's loss `scores`; the first argument is `[B]`."""

    input_type = LossInput.SCORES

    def _value(self, inputs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Result:
        errors = (inputs - data["advantages"][:, 0]).square() * data["sample_mask"]
        return errors.sum() / global_valid_seqs, {}


class ScorePairsLoss(_Loss):
    """The oracle's loss `score_pairs`, for rows of a group that follow each other."""

    input_type = LossInput.SCORES
    needs_groups = True

    def _value(self, inputs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Result:
        return _pairs(inputs, data, global_valid_seqs)


class LogitsLoss(_Loss):
    """Negative log-likelihood computed from logits; the first argument is `[B, S-1, V]`."""

    input_type = LossInput.LOGITS

    def _value(self, inputs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Result:
        targets = data["input_ids"][:, 1:].unsqueeze(-1)
        logprobs = torch.log_softmax(inputs, dim=-1).gather(-1, targets).squeeze(-1)
        return super()._value(logprobs, data, global_valid_seqs, global_valid_toks)


class EntropyLoss(_Loss):
    """The mean entropy of the distributions of valid tokens, with its gradient."""

    wants_entropy = True
    entropy_gradient = True
    at_sampling_temperature = True

    def _value(self, inputs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Result:
        mask = _mask(data)
        return (data["entropy"] * mask).sum() / global_valid_toks, {}


class NotFiniteLoss(_Loss):
    """A loss whose gradient is NaN."""

    def _value(self, inputs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Result:
        loss, metrics = super()._value(inputs, data, global_valid_seqs, global_valid_toks)
        return loss * math.nan, metrics


class FailingLoss(_Loss):
    """Raises when the batch contains the row whose entry in `data["row"]` is `failing_row`."""

    class Failed(RuntimeError):
        """Raised on purpose."""

    def __init__(self, failing_row: int) -> None:
        self.failing_row = failing_row

    def _value(self, inputs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Result:
        if bool((data["row"] == self.failing_row).any()):
            raise self.Failed("raised on purpose")
        return super()._value(inputs, data, global_valid_seqs, global_valid_toks)
