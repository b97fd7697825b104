"""Importance weights that correct for the difference between trainer and generator.

https://fengyao.notion.site/off-policy-rl (truncated weights of tokens) and
https://richardli.xyz/rl-collapse (weights and masks of whole sequences).
"""

from __future__ import annotations

import torch
from torch import Tensor

from rlframework.algorithms.losses.averages import token_mean
from rlframework.algorithms.losses.kl import kl_divergence
from rlframework.algorithms.losses.ratios import bounded_exp, row_mean
from rlframework.config.algorithms import ClippedPGLossConfig


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
