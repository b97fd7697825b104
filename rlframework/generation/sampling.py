"""Sampling the next token of each row: temperature, top-k, top-p, and per-row random numbers.

A token is drawn by inverting the cumulative distribution at a uniform number that depends only on the row's seed and
position, so neither the other rows nor their order change it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_MANTISSA_BITS = 53


@dataclass(frozen=True)
class SamplingRule:
    """How tokens are chosen. `temperature` 0 is greedy, with the log-probabilities of temperature 1."""

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0

    @property
    def greedy(self) -> bool:
        """Whether to choose the most likely token."""
        return self.temperature == 0.0


def row_uniforms(seeds: Tensor, count: int) -> Tensor:
    """Return `[B, count]` float64 in [0, 1); entry `[b, t]` depends only on `seeds[b]` (any int64) and `t`.

    Philox4x64 (Salmon et al. 2011) with the seed as the key. Raising `count` does not change earlier entries.
    """
    rows = np.empty((len(seeds), count), dtype=np.float64)
    for row, seed in enumerate(seeds.tolist()):
        raw = np.random.Philox(key=seed & 0xFFFF_FFFF_FFFF_FFFF).random_raw(count)
        rows[row] = (raw >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS
    return torch.from_numpy(rows)


def choose(logits: Tensor, uniforms: Tensor | None, rule: SamplingRule) -> tuple[Tensor, Tensor]:
    """Return the next tokens `[B]` int64 and their log-probabilities `[B]` fp32, given `logits [B, V]`.

    `uniforms [B]` are not needed for greedy decoding. Log-probabilities are of the full distribution at the
    temperature, before top-k and top-p.
    """
    scaled = logits.float() if rule.greedy or rule.temperature == 1.0 else logits.float() / rule.temperature
    logprobs = torch.log_softmax(scaled, dim=-1)
    if rule.greedy or uniforms is None:
        tokens = logprobs.argmax(dim=-1)
    else:
        tokens = draw(logprobs, uniforms, rule.top_k, rule.top_p)
    return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)


def draw(logprobs: Tensor, uniforms: Tensor, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Draw one token per row, `[B]` int64, from `logprobs [B, V]` using `uniforms [B]` in [0, 1).

    `top_k` keeps the k most likely tokens. `top_p` (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751) keeps the
    most likely of these, renormalised, until their mass reaches `top_p`, and at least one. The kept tokens retain their
    relative probabilities.
    """
    truncated = top_p < 1.0 or (top_k is not None and top_k < logprobs.shape[-1])
    if not truncated:
        return _invert(logprobs.double().exp(), uniforms)
    values, tokens = logprobs.topk(min(top_k or logprobs.shape[-1], logprobs.shape[-1]), dim=-1)
    masses = values.double().exp()
    if top_p < 1.0:
        masses = _nucleus(masses, top_p)
    return tokens.gather(-1, _invert(masses, uniforms)[:, None]).squeeze(-1)


def _nucleus(masses: Tensor, top_p: float) -> Tensor:
    """Set `masses [B, K]`, sorted in descending order, to 0 after the nucleus."""
    share = masses / masses.sum(-1, keepdim=True)
    before = share.cumsum(-1) - share
    keep = before < top_p
    keep[:, 0] = True
    return masses * keep


def _invert(masses: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index where the cumulative `masses [B, K]` exceed `uniforms` times the total; never mass 0."""
    sums = masses.cumsum(-1)
    thresholds = uniforms.to(sums)[:, None] * sums[:, -1:]
    index = torch.searchsorted(sums, thresholds, right=True).squeeze(-1)
    return index.clamp_(max=masses.shape[-1] - 1)
