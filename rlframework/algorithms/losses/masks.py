"""Masked means by global counts: the two levels at which a loss averages."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict


def loss_mask(data: BatchedDataDict[Any], dtype: torch.dtype = torch.float32) -> Tensor:
    """`[B, S-1]`: 1 where a target token counts, in the layout of `next_token_logprobs`."""
    mask: Tensor = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    return mask.to(dtype)


def token_mean(values: Tensor, mask: Tensor, global_valid_toks: Tensor) -> Tensor:
    """This microbatch's share of the mean of `values [B, S-1]` over all valid tokens of the global batch."""
    return (values * mask).sum() / global_valid_toks.clamp(min=1.0)


def sequence_mean(values: Tensor, mask: Tensor, global_valid_seqs: Tensor) -> Tensor:
    """Its share of the mean over valid sequences of each sequence's mean over its valid tokens."""
    means = (values * mask).sum(1) / mask.sum(1).clamp(min=1.0)
    return means.sum() / global_valid_seqs.clamp(min=1.0)
