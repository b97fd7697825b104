"""Means of a loss over a global batch, as the terms of one microbatch."""

from __future__ import annotations

from torch import Tensor

from rlframework.algorithms.losses.nll import token_mean

__all__ = ["sequence_mean", "token_mean"]


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
