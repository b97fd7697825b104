"""Sampling of the next tokens of a batch of rows.

A token is drawn by inverting the cumulative distribution at a uniform number that depends only on the row's seed and
position, so neither the other rows nor their order change it.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash
from torch import Tensor, nn

from rlframework.interfaces.generation import SamplingParams

_BLOCK = 128
"""Tokens whose probabilities are added up before the cumulative sum. It divides the sizes of most vocabularies."""

SAMPLED_ELEMENTS = 2**23
"""Logits that are sampled from at once, at most: 55 rows of a vocabulary of 151,936. Bounds the fp64 copies."""

_MANTISSA_BITS = 53


def row_uniforms(seeds: Tensor, count: int) -> Tensor:
    """Return `[B, count]` float64 in [0, 1); entry `[b, t]` depends only on `seeds[b]` (any int64) and `t`.

    Philox4x64 (Salmon et al. 2011) with the seed as the key. Raising `count` does not change earlier entries.
    """
    rows = np.empty((len(seeds), count), dtype=np.float64)
    for row, seed in enumerate(seeds.tolist()):
        raw = np.random.Philox(key=seed & 0xFFFF_FFFF_FFFF_FFFF).random_raw(count)
        rows[row] = (raw >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS
    return torch.from_numpy(rows)


def folded_seed(seed: int) -> int:
    """Return 32 bits that depend on all 64 of `seed`, for a library whose generators take no more."""
    return xxhash.xxh32_intdigest(seed.to_bytes(8, "little", signed=True))


def choose(
    logits: Tensor, uniforms: Tensor | None, rule: SamplingParams, never: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the next tokens `[B]` int64 and their log-probabilities `[B]` fp32, given `logits [B, V]`.

    `uniforms [B]` are not needed for greedy decoding. `never [n]`: tokens that are not chosen. Log-probabilities are of
    the full distribution at the temperature, before top-k and top-p, and with the tokens that are not chosen.
    """
    rows = max(1, SAMPLED_ELEMENTS // logits.shape[-1])
    if len(logits) <= rows:
        return _choose(logits, uniforms, rule, never)
    parts = [uniforms[start : start + rows] if uniforms is not None else None for start in range(0, len(logits), rows)]
    chosen = [_choose(part, some, rule, never) for part, some in zip(logits.split(rows), parts, strict=True)]
    tokens, logprobs = zip(*chosen, strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _choose(
    logits: Tensor, uniforms: Tensor | None, rule: SamplingParams, never: Tensor | None
) -> tuple[Tensor, Tensor]:
    temperature = 1.0 if rule.greedy else rule.temperature
    if rule.truncated and uniforms is not None:
        logprobs = torch.log_softmax(logits.float() / temperature, dim=-1)
        allowed = logprobs if never is None else logprobs.index_fill(-1, never, -torch.inf)
        tokens = draw(allowed, uniforms, rule.top_k, rule.top_p)
        return tokens, logprobs.gather(-1, tokens[:, None]).squeeze(-1)
    top = logits.amax(-1, keepdim=True).float()
    # the only tensor as large as the logits: fresh memory costs more than arithmetic
    masses = logits - top if logits.dtype == top.dtype else logits.float().sub_(top)
    masses = (masses if temperature == 1.0 else masses.div_(temperature)).exp_()
    if rule.greedy or uniforms is None:
        allowed = logits if never is None else logits.index_fill(-1, never, -torch.inf)
        tokens, total = allowed.argmax(-1), masses.sum(-1)
    elif never is not None:
        total = masses.double().sum(-1)
        tokens, _ = _invert(masses.index_fill_(-1, never, 0.0), uniforms)
    else:
        tokens, total = _invert(masses, uniforms)
    chosen = (logits.gather(-1, tokens[:, None]).float() - top).squeeze(-1) / temperature
    return tokens, (chosen - total.log()).float()


def draw(logprobs: Tensor, uniforms: Tensor, top_k: int | None = None, top_p: float = 1.0) -> Tensor:
    """Draw one token per row, `[B]` int64, from `logprobs [B, V]` using `uniforms [B]` in [0, 1).

    `top_k` keeps the k most likely tokens. `top_p` (nucleus sampling, Holtzman et al. 2020, arXiv:1904.09751) keeps the
    most likely of these, renormalised, until their mass reaches `top_p`, and at least one. The kept tokens retain their
    relative probabilities.
    """
    size = logprobs.shape[-1]
    if top_p == 1.0 and (top_k is None or top_k >= size):
        return _invert(logprobs.double().exp(), uniforms)[0]
    values, tokens = logprobs.topk(min(top_k or size, size), dim=-1)
    masses = values.double().exp()
    if top_p < 1.0:
        share = masses / masses.sum(-1, keepdim=True)
        keep = share.cumsum(-1) - share < top_p
        keep[:, 0] = True
        masses = masses * keep
    return tokens.gather(-1, _invert(masses, uniforms)[0][:, None]).squeeze(-1)


def _invert(masses: Tensor, uniforms: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first index where the cumulative `masses [B, K]` exceed `uniforms` times the total, and the total in
    fp64; never an index of mass 0.

    Sums of blocks, in the dtype of the masses, show in which block the index is, so only this one is accumulated.
    """
    rows, size = masses.shape
    padded = nn.functional.pad(masses, (0, -size % _BLOCK)) if size % _BLOCK else masses
    blocks = padded.view(rows, -1, _BLOCK)
    sums = blocks.sum(-1).double().cumsum(-1)
    block = _first_beyond(sums, uniforms.to(sums)[:, None] * sums[:, -1:])
    before = nn.functional.pad(sums, (1, 0)).gather(-1, block)
    inside = blocks[torch.arange(rows, device=masses.device), block.squeeze(-1)].double().cumsum(-1)
    index = _first_beyond(inside, uniforms.to(sums)[:, None] * sums[:, -1:] - before)
    return (block * _BLOCK + index).squeeze(-1), sums[:, -1]


def _first_beyond(sums: Tensor, thresholds: Tensor) -> Tensor:
    """Return the first index `[B, 1]` where ascending `sums [B, K]` exceed `thresholds [B, 1]`, or reach the last."""
    index = torch.searchsorted(sums, thresholds, right=True)
    return torch.minimum(index, (sums < sums[:, -1:]).sum(-1, keepdim=True)).clamp_(max=sums.shape[-1] - 1)
