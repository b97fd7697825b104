"""Negative log-likelihood: the loss of supervised training."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from rlframework.algorithms.losses.masks import loss_mask
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
        mask = loss_mask(data, next_token_logprobs.dtype)
        loss = -(next_token_logprobs * mask).sum() / global_valid_toks.clamp(min=1.0)
        return loss, {"num_valid_samples": data["sample_mask"].sum().detach()}
