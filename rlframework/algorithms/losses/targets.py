"""Losses on given targets: of tokens (negative log-likelihood), and of values (a critic's)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlframework.algorithms.losses.terms import loss_mask, token_mean
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ValueLossConfig
from rlframework.interfaces.loss import LossColumn, LossInput, LossType


class ValueLoss:
    """Half the squared difference of value and return, the mean over the valid tokens of the global batch.

    With `clip`, a token has the larger one of the losses of its value and of the value bounded to at most `clip` away
    from the earlier one, so a value that moved further towards its return has no gradient. Reads these values of
    `data`, `[B, S]` and aligned with `input_ids`:

    - `returns`, the targets;
    - `values`, those of the critic before it is trained on the batch, with `clip`.
    """

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInput.VALUES
    wants_entropy = False
    at_sampling_temperature = False

    def __init__(self, config: ValueLossConfig) -> None:
        self.config = config

    @property
    def reads(self) -> dict[str, LossColumn]:
        """See `LossFunction`."""
        return {"returns": LossColumn()} | ({} if self.config.clip is None else {"values": LossColumn()})

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """See `LossFunction`, whose first argument is the values."""
        values = next_token_logprobs
        clip, mask, returns = self.config.clip, loss_mask(data, values.dtype), data["returns"][:, 1:]
        errors = (values - returns).square()
        metrics: dict[str, Any] = {"num_valid_samples": data["sample_mask"].sum()}
        if clip is not None:
            earlier = data["values"][:, 1:]
            bounded = (earlier + (values - earlier).clamp(-clip, clip) - returns).square()
            metrics["value_clip_fraction"] = token_mean((bounded > errors).float(), mask, global_valid_toks)
            errors = torch.maximum(errors, bounded)
        loss = 0.5 * token_mean(errors, mask, global_valid_toks)
        metrics["value_loss"] = loss.detach()
        return self.config.coef * loss, metrics


class NLLLoss:
    """Mean over the valid tokens of the global batch of -log p(token), in nats."""

    loss_type = LossType.TOKEN_LEVEL
    input_type = LossInput.LOGPROBS
    wants_entropy = False
    at_sampling_temperature = False

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: BatchedDataDict[Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, Any]]:
        """See `LossFunction`. Its only metric is the number of valid rows."""
        loss = -token_mean(next_token_logprobs, loss_mask(data, next_token_logprobs.dtype), global_valid_toks)
        return loss, {"num_valid_samples": data["sample_mask"].sum().detach()}
