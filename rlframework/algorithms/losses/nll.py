"""Negative log-likelihood: the loss of supervised training. Also the mask and the mean that all losses use."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

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


def loss_mask(data: BatchedDataDict[Any], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `[B, S-1]`, in the layout of `next_token_logprobs`: 1 for target tokens that count, 0 for the others."""
    mask: Tensor = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return mask.to(dtype)


def token_mean(values: Tensor, mask: Tensor, global_valid_toks: Tensor) -> Tensor:
    """Return this microbatch's term of the mean of `values [B, S-1]` over all valid tokens of the global batch."""
    return (values * mask).sum() / global_valid_toks.clamp(min=1.0)
