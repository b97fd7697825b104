"""Metrics of the mismatch between the trainer and the generation engine that sampled, for losses on rollouts."""

from __future__ import annotations

import torch
from torch import Tensor

from rlframework.algorithms.losses.averages import token_mean
from rlframework.algorithms.losses.kl import kl_divergence


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
