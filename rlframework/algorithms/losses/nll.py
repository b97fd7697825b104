"""Negative log-likelihood: the loss of supervised training."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlframework.algorithms.losses.terms import loss_mask as loss_mask
from rlframework.algorithms.losses.terms import token_mean as token_mean
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.loss import LossInput, LossType


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
