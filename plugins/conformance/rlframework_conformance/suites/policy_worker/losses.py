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


class MetricsLoss(NLLLoss):
    """Negative log-likelihood with metrics whose values for the whole batch are known."""

    def __call__(
        self, next_token_logprobs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> Result:
        """See `LossFunction`."""
        loss, _ = super().__call__(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
        mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
        advantages = data["advantages"][:, 1:]
        metrics: dict[str, Any] = {"advantage": (advantages * mask).sum() / global_valid_toks}
        if bool(mask.any()):
            metrics["advantage_min"] = advantages[mask > 0].min()
            metrics["advantage_max"] = advantages[mask > 0].max()
        return loss, metrics


class PairsLoss(NLLLoss):
    """The oracle's loss `pairs`, for rows of a group that follow each other."""

    needs_groups = True

    def __call__(
        self, next_token_logprobs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> Result:
        """See `LossFunction`."""
        mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
        means = (next_token_logprobs * mask).sum(1) / mask.sum(1).clamp(min=1.0)
        ids = data["group_ids"]
        terms = -torch.nn.functional.logsigmoid(means[:-1] - means[1:]) * (ids[:-1] == ids[1:])
        return terms.sum() / global_valid_seqs, {}


class SetsLoss(NLLLoss):
    """The oracle's loss `sets`; the first argument is `[B, S-1, 1 + K]`."""

    input_type = LossInput.TOKEN_SETS

    def __call__(
        self, next_token_logprobs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> Result:
        """See `LossFunction`."""
        weighted = (next_token_logprobs[..., 1:] * data["set_weights"][:, 1:]).sum(-1)
        return super().__call__(next_token_logprobs[..., 0] + weighted, data, global_valid_seqs, global_valid_toks)


class ValuesLoss(NLLLoss):
    """The oracle's loss `values`; the first argument is `[B, S-1]`, the value before each token but the first."""

    input_type = LossInput.VALUES

    def __call__(self, values: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Result:
        """See `LossFunction`."""
        mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
        return ((values - data["advantages"][:, 1:]).square() * mask).sum() / global_valid_toks, {}


class ScoresLoss(NLLLoss):
    """The oracle's loss `scores`; the first argument is `[B]`."""

    input_type = LossInput.SCORES

    def __call__(self, scores: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Result:
        """See `LossFunction`."""
        errors = (scores - data["advantages"][:, 0]).square() * data["sample_mask"]
        return errors.sum() / global_valid_seqs, {}


class ScorePairsLoss(NLLLoss):
    """The oracle's loss `score_pairs`, for rows of a group that follow each other."""

    input_type = LossInput.SCORES
    needs_groups = True

    def __call__(self, scores: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor) -> Result:
        """See `LossFunction`."""
        ids = data["group_ids"]
        terms = -torch.nn.functional.logsigmoid(scores[:-1] - scores[1:]) * (ids[:-1] == ids[1:])
        return terms.sum() / global_valid_seqs, {}


class LogitsLoss(NLLLoss):
    """Negative log-likelihood computed from logits; the first argument is `[B, S-1, V]`."""

    input_type = LossInput.LOGITS

    def __call__(
        self, next_token_logprobs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> Result:
        """See `LossFunction`."""
        targets = data["input_ids"][:, 1:].unsqueeze(-1)
        logprobs = torch.log_softmax(next_token_logprobs, dim=-1).gather(-1, targets).squeeze(-1)
        return super().__call__(logprobs, data, global_valid_seqs, global_valid_toks)


class EntropyLoss(NLLLoss):
    """The mean entropy of the distributions of valid tokens, with its gradient."""

    wants_entropy = True
    entropy_gradient = True
    at_sampling_temperature = True

    def __call__(
        self, next_token_logprobs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> Result:
        """See `LossFunction`."""
        mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:]
        return (data["entropy"] * mask).sum() / global_valid_toks, {}


class NotFiniteLoss(NLLLoss):
    """A loss whose gradient is NaN."""

    def __call__(
        self, next_token_logprobs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> Result:
        """See `LossFunction`."""
        loss, metrics = super().__call__(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
        return loss * math.nan, metrics


class FailingLoss(NLLLoss):
    """Raises when the batch contains the row whose entry in `data["row"]` is `failing_row`."""

    class Failed(RuntimeError):
        """Raised on purpose."""

    def __init__(self, failing_row: int) -> None:
        self.failing_row = failing_row

    def __call__(
        self, next_token_logprobs: Tensor, data: Batch, global_valid_seqs: Tensor, global_valid_toks: Tensor
    ) -> Result:
        """See `LossFunction`."""
        if bool((data["row"] == self.failing_row).any()):
            raise self.Failed("raised on purpose")
        return super().__call__(next_token_logprobs, data, global_valid_seqs, global_valid_toks)
