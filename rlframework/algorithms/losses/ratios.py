"""Probability ratios of the trained policy to an earlier one, per token and per row, and the surrogates of them.

An infinite ratio is no large number but an end: its gradient is NaN wherever a clip, a mask or an advantage of 0 takes
the gradient away, because infinity times 0 is. So exponentials of differences of log-probabilities are bounded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from rlframework.config.algorithms import ClippedPGLossConfig

LARGEST_LOG = 40.0
"""Bound on the logarithm of a ratio: e^40 is beyond every clip and cap, and the product of two is finite in fp32."""


def bounded_exp(difference: Tensor) -> Tensor:
    """Return exp(`difference`), of at most `LARGEST_LOG`, beyond which it has no gradient."""
    return difference.clamp(max=LARGEST_LOG).exp()


def row_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Return the mean of `values [B, S-1]` over the `mask`ed tokens of each row, `[B, 1]`; 0 without any."""
    return (values * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1.0)


def probability_ratio(kind: str, logprobs: Tensor, previous: Tensor, mask: Tensor) -> Tensor:
    """Return the ratio exp(`logprobs` - `previous`) of kind `ClippedPGLossConfig.ratio`, `[B, S-1]`.

    "token": of each token. "sequence": the geometric mean s over the tokens of a row (GSPO, arXiv:2507.18071, eq. 7),
    the same for all of them. "sequence_token": sg[s] p / sg[p] (eq. 14), equal to s, with the gradient of each token.
    "product": over all tokens of a row, the ratio of the probabilities of the completion.
    """
    difference = logprobs - previous
    if kind == "token":
        return bounded_exp(difference)
    if kind == "sequence":
        return bounded_exp(row_mean(difference, mask)).expand_as(difference)
    if kind == "sequence_token":
        return bounded_exp(row_mean(difference.detach(), mask)) * (logprobs - logprobs.detach()).exp()
    return bounded_exp((difference * mask).sum(1, keepdim=True)).expand_as(difference)


def clipped(ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: ClippedPGLossConfig) -> tuple[Tensor, Tensor]:
    """Return max(-A r, -A clip(r)) of each token, bounded by dual clip, and a mask of those it leaves no gradient."""
    bounded = ratio.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)
    plain, limited = -advantages * ratio, -advantages * bounded
    loss, without_gradient = torch.maximum(plain, limited), limited > plain
    if config.ratio_clip_c is not None:  # bounds the loss of a token with negative advantage and a large ratio
        ceiling = -advantages * config.ratio_clip_c
        beyond = (advantages < 0) & (loss > ceiling)
        loss, without_gradient = torch.where(beyond, ceiling, loss), without_gradient | beyond
    return loss, without_gradient


def cispo(ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: ClippedPGLossConfig) -> tuple[Tensor, Tensor]:
    """Return -sg[clip(r)] A log p of each token (arXiv:2506.13585, eq. 4), and a mask of the clipped weights."""
    weight = ratio.detach()
    bounded = weight.clamp(1.0 - config.ratio_clip_min, 1.0 + config.ratio_clip_max)
    return -bounded * advantages * logprobs, bounded != weight


def reinforce(
    ratio: Tensor, logprobs: Tensor, advantages: Tensor, config: ClippedPGLossConfig
) -> tuple[Tensor, Tensor]:
    """Return -A log p of each token, and a mask without any token."""
    return -advantages * logprobs, torch.zeros_like(ratio, dtype=torch.bool)


SURROGATES: Mapping[str, Callable[[Tensor, Tensor, Tensor, ClippedPGLossConfig], tuple[Tensor, Tensor]]] = {
    "clipped": clipped,
    "cispo": cispo,
    "reinforce": reinforce,
}
"""By `ClippedPGLossConfig.surrogate`: functions of ratio, log-probabilities and advantages, `[B, S-1]` each."""
