"""Means over tokens or sequences, normalized by global counts, and estimates of the KL divergence of tokens."""

from __future__ import annotations

from typing import Any, Literal

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


def sequence_mean(values: Tensor, mask: Tensor, global_valid_seqs: Tensor) -> Tensor:
    """Return this microbatch's term of the mean, over all valid sequences of the global batch, of their token means.

    `values` and `mask` are `[B, S-1]`; the mean of a sequence is over its valid tokens.
    """
    means = (values * mask).sum(1) / mask.sum(1).clamp(min=1.0)
    return means.sum() / global_valid_seqs.clamp(min=1.0)


def kl_divergence(logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"]) -> Tensor:
    """Estimate KL(policy || reference) from log-probabilities of sampled tokens, elementwise.

    With r = reference - policy: k1 = -r, k2 = r^2 / 2, k3 = exp(r) - r - 1 (http://joschu.net/blog/kl-approx.html).
    k1 and k3 are unbiased; k2 and k3 have low variance. As a loss term, the expected gradient of k2 is that of the
    divergence, that of k3 is close to it, and that of k1 is zero: use k1 for reward shaping and metrics.
    """
    ratio = reference_logprobs - logprobs
    if estimator == "k1":
        return -ratio
    return 0.5 * ratio.square() if estimator == "k2" else torch.expm1(ratio) - ratio
