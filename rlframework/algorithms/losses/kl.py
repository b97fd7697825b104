"""Estimates of the KL divergence from log-probabilities of sampled tokens."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rlframework.algorithms.losses.ratios import LARGEST_LOG, bounded_exp


def kl_divergence(
    logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k2", "k3"], maximum: float | None = None
) -> Tensor:
    """Estimate KL(policy || reference) from log-probabilities of sampled tokens, elementwise.

    With r = reference - policy: k1 = -r, k2 = r^2 / 2, k3 = exp(r) - r - 1 (http://joschu.net/blog/kl-approx.html).
    k1 and k3 are unbiased; k2 and k3 have low variance. As a loss term, the expected gradient of k2 is that of the
    divergence, that of k3 is close to it, and that of k1 is zero: use k1 for reward shaping and metrics, or a factor
    from `kl_weight`. Estimates are clamped to `-maximum ... maximum`, if given.
    """
    ratio = reference_logprobs - logprobs
    if estimator == "k1":
        divergence = -ratio
    elif estimator == "k2":
        divergence = 0.5 * ratio.square()
    else:
        bounded = ratio.clamp(max=LARGEST_LOG)
        divergence = torch.expm1(bounded) - bounded
    return bounded_kl(divergence, maximum)


def bounded_kl(divergence: Tensor, maximum: float | None) -> Tensor:
    """Return `divergence` clamped to `-maximum ... maximum`, without gradient beyond; as it is with None."""
    return divergence if maximum is None else divergence.clamp(-maximum, maximum)


def kl_weight(
    correction: Literal["ratio", "score", "generator"], logprobs: Tensor, ratio: Tensor, sampled: Tensor
) -> Tensor:
    """Return the factor of the KL estimate of each token, with its gradient: `ClippedPGLossConfig.kl_correction`.

    The policy chooses the tokens, so the gradient of an expected estimate is that of the estimate, plus the estimate
    times that of the log-probability (arXiv:2506.09477). "score" is 1 with this gradient. "ratio", and "generator",
    which is exp(`logprobs` - `sampled`), also weigh tokens that another policy sampled.
    """
    if correction == "score":
        return (logprobs - logprobs.detach()).exp()
    return ratio if correction == "ratio" else bounded_exp(logprobs - sampled)
