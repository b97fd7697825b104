"""The terms of losses: means over a global batch, probability ratios, KL divergence, importance weights.

An infinite ratio is no large number but an end: its gradient is NaN wherever a clip, a mask or an advantage of 0 takes
the gradient away, because infinity times 0 is. So exponentials of differences of log-probabilities are bounded.

Importance weights correct for the difference between trainer and generator:
https://fengyao.notion.site/off-policy-rl (truncated weights of tokens) and
https://richardli.xyz/rl-collapse (weights and masks of whole sequences).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.algorithms import ClippedPGLossConfig


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


def importance_weights(
    difference: Tensor, mask: Tensor, global_valid_toks: Tensor, config: ClippedPGLossConfig
) -> tuple[Tensor | None, dict[str, Tensor]]:
    """Return the constant weights of the policy term, `[B, S-1]` or `[B, 1]`, None if all are 1; and their metrics.

    `difference [B, S-1]` is the trainer's log-probability minus the generator's, 0 where `mask` is.
    """
    weights: Tensor | None = None
    metrics: dict[str, Tensor] = {}
    if config.importance_correction == "truncated":
        weights = level_ratio(config.importance_level, difference, mask)
        beyond = (weights > config.importance_cap).float()
        metrics["importance_weight"] = token_mean(weights, mask, global_valid_toks)
        metrics["importance_truncated_fraction"] = token_mean(beyond, mask, global_valid_toks)
        weights = weights.clamp(min=config.importance_floor, max=config.importance_cap)
    if config.importance_mask != "none":
        ratio = level_ratio(config.importance_mask, difference, mask)
        keep = ((ratio >= config.importance_mask_min) & (ratio <= config.importance_mask_max)).to(difference.dtype)
        metrics["importance_masked_fraction"] = token_mean(1.0 - keep, mask, global_valid_toks)
        weights = keep if weights is None else weights * keep
    return weights, metrics


def level_ratio(level: str, difference: Tensor, mask: Tensor) -> Tensor:
    """Return exp(difference) per token `[B, S-1]`, or per row `[B, 1]`: "sequence" of the sum, "geometric" the mean."""
    if level == "token":
        return bounded_exp(difference)
    if level == "geometric":
        return bounded_exp(row_mean(difference, mask))
    return bounded_exp((difference * mask).sum(1, keepdim=True))


def mismatch_metrics(
    difference: Tensor, mask: Tensor, global_valid_toks: Tensor, bound: float = 0.1
) -> dict[str, Tensor]:
    """Return metrics of `difference`, the trainer's log-probabilities minus the engine's, without waiting for a device.

    `difference` and `mask` are `[B, S-1]` fp32, both 0 outside of the completions. Means are over the valid tokens of
    the global batch: the KL divergence of the trainer from the engine (k3) and the absolute difference, its maximum,
    and the fraction of tokens beyond `bound`.
    """
    size = difference.abs()
    kl = kl_divergence(torch.zeros_like(difference), difference, "k3")
    return {
        "generation_kl": token_mean(kl, mask, global_valid_toks),
        "generation_logprob_difference": token_mean(size, mask, global_valid_toks),
        "generation_logprob_difference_max": size.max(),
        "generation_logprob_beyond_fraction": token_mean((size > bound).float(), mask, global_valid_toks),
    }
