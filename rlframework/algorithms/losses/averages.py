"""The mask of a loss, and means over a global batch as the terms of one microbatch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict


def loss_mask(data: BatchedDataDict[Any], dtype: torch.dtype = torch.float32) -> Tensor:
    """Return `[B, S-1]`, in the layout of `next_token_logprobs`: 1 for target tokens that count, 0 for the others."""
    mask: Tensor = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return mask.to(dtype)


def token_mean(values: Tensor, mask: Tensor, global_valid_toks: Tensor) -> Tensor:
    """Return this microbatch's term of the mean of `values [B, S-1]` over all valid tokens of the global batch."""
    return (values * mask).sum() / global_valid_toks.clamp(min=1.0)


def sequence_mean(
    values: Tensor, mask: Tensor, global_valid_seqs: Tensor, length: int | None = None, weights: Tensor | None = None
) -> Tensor:
    """Return this microbatch's term of the mean, over all valid sequences of the global batch, of their token means.

    `values` and `mask` are `[B, S-1]`; the mean of a sequence is over its valid tokens, or its sum divided by `length`,
    times its `weights [B]`.
    """
    means = (values * mask).sum(1) / (mask.sum(1).clamp(min=1.0) if length is None else length)
    if weights is not None:
        means = means * weights
    return means.sum() / global_valid_seqs.clamp(min=1.0)
