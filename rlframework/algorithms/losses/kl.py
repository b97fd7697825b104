"""Estimators of KL(policy || reference) from the log-probabilities of sampled tokens (http://joschu.net/blog/kl-approx.html)."""

from __future__ import annotations

import torch
from torch import Tensor


def kl_divergence(logprobs: Tensor, reference_logprobs: Tensor, estimator: str) -> Tensor:
    """Elementwise estimate with log ratio r = reference - policy: k1 = -r, k2 = r^2 / 2, k3 = exp(r) - r - 1.

    k1 and k3 are unbiased, k2 and k3 have low variance. As a loss term: the gradient of k2's expectation is that of the
    divergence, k3's is close to it, and k1's is zero in expectation (it is for reward shaping and as a metric).
    """
    ratio = reference_logprobs - logprobs
    if estimator == "k1":
        return -ratio
    if estimator == "k2":
        return 0.5 * ratio.square()
    if estimator == "k3":
        return torch.expm1(ratio) - ratio
    raise ValueError(f"KL estimator {estimator!r} is unknown; take k1, k2 or k3")
