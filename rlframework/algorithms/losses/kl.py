"""Estimates of the KL divergence from log-probabilities of sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor


def kl_divergence(
    logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"], maximum: float | None = None
) -> Tensor:
    """Estimate KL(policy || reference) from log-probabilities of sampled tokens, elementwise.

    With r = reference - policy: k1 = -r, k2 = r^2 / 2, k3 = exp(r) - r - 1 (http://joschu.net/blog/kl-approx.html).
    k1 and k3 are unbiased; k2 and k3 have low variance. As a loss term, the expected gradient of k2 is that of the
    divergence, that of k3 is close to it, and that of k1 is zero: use k1 for reward shaping and metrics. Estimates are
    clamped to `-maximum ... maximum`, if given.
    """
    ratio = reference_logprobs - logprobs
    if estimator == "k1":
        divergence = -ratio
    elif estimator == "k2":
        divergence = 0.5 * ratio.square()
    else:
        # an infinite exponential would make the gradient of the clamp NaN; at 80 any `maximum` is exceeded already
        bounded = ratio if maximum is None else ratio.clamp(max=80.0)
        divergence = torch.expm1(bounded) - bounded
    return divergence if maximum is None else divergence.clamp(-maximum, maximum)
