"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens (http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_divergence(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Estimate the KL elementwise, with r = reference - policy: k1 = -r, k2 = r^2 / 2, k3 = exp(r) - r - 1.

    k1 and k3 are unbiased; k2 and k3 have low variance. As a loss term, the expected gradient of k2 is that of the
    divergence, that of k3 is close to it, and that of k1 is zero: use k1 for reward shaping and metrics.
    """
    ratio = reference_logprobs - logprobs
    if estimator == "k1":
        return -ratio
    if estimator == "k2":
        return 0.5 * ratio.square()
    if estimator == "k3":
        return torch.expm1(ratio) - ratio
    raise ValueError(f"unknown KL estimator {estimator!r}; use k1, k2 or k3")
