"""Decoding for a batch of rows, on a transformers causal language model: sampling, and the loop over time steps.

Each distinct prompt is prefilled once, and finished rows leave the batch and the cache. A token is drawn by inverting
the cumulative distribution at a uniform number that depends only on the row's seed and position, so neither the other
rows nor their order change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from rlframework.generation.row_forward import RowForward
from rlframework.interfaces.generation import SamplingParams

_COMPACTION_RATIO = 4
"""Finished rows are removed once they are 1 / `_COMPACTION_RATIO` of the batch: moving the cache costs about a step."""

_CHECK_EVERY = 16
"""Steps between two looks at which rows are finished, on a device for which the host would have to wait."""

SAMPLED_ELEMENTS = 2**23
"""Logits that are sampled from at once, at most: 55 rows of a vocabulary of 151,936. Bounds the fp64 copies."""

_MANTISSA_BITS = 53


# -- sampling ----------------------------------------------------------------------------------------------------------


def row_uniforms(seeds: Tensor, count: int) -> Tensor:
    """Return `[B, count]` float64 in [0, 1); entry `[b, t]` depends only on `seeds[b]` (any int64) and `t`.

    Philox4x64 (Salmon et al. 2011) with the seed as the key. Raising `count` does not change earlier entries.
    """
    rows = np.empty((len(seeds), count), dtype=np.float64)
    for row, seed in enumerate(seeds.tolist()):
        raw = np.random.Philox(key=seed & 0xFFFF_FFFF_FFFF_FFFF).random_raw(count)
        rows[row] = (raw >> (64 - _MANTISSA_BITS)) * 2.0**-_MANTISSA_BITS
    return torch.from_numpy(rows)


def choose(logits: Tensor, uniforms: Tensor | None, rule: SamplingParams) -> tuple[Tensor, Tensor]:
    """Return the next tokens `[B]` int64 and their log-probabilities `[B]` fp32, given `logits [B, V]`.

    `uniforms [B]` are not needed for greedy decoding. Log-probabilities are of the full distribution at the
    temperature, before top-k and top-p.
    """
    rows = max(1, SAMPLED_ELEMENTS // logits.shape[-1])
    if len(logits) <= rows:
        return _choose(logits, uniforms, rule)
    parts = [uniforms[start : start + rows] if uniforms is not None else None for start in range(0, len(logits), rows)]
    tokens, logprobs = zip(*map(_choose, logits.split(rows), parts, [rule] * len(parts)), strict=True)
    return torch.cat(tokens), torch.cat(logprobs)


def _choose(logits: Tensor, uniforms: Tensor | None, rule: SamplingParams) -> tuple[Tensor, Tensor]:
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
    size = logprobs.shape[-1]
    if top_p == 1.0 and (top_k is None or top_k >= size):
        return _invert(logprobs.double().exp(), uniforms)
    values, tokens = logprobs.topk(min(top_k or size, size), dim=-1)
    masses = values.double().exp()
    if top_p < 1.0:
        share = masses / masses.sum(-1, keepdim=True)
        keep = share.cumsum(-1) - share < top_p
        keep[:, 0] = True
        masses = masses * keep
    return tokens.gather(-1, _invert(masses, uniforms)[:, None]).squeeze(-1)


def _invert(masses: Tensor, uniforms: Tensor) -> Tensor:
    """Return the first index where the cumulative `masses [B, K]` exceed `uniforms` times the total; never mass 0."""
    sums = masses.cumsum(-1)
    thresholds = uniforms.to(sums)[:, None] * sums[:, -1:]
    index = torch.searchsorted(sums, thresholds, right=True).squeeze(-1)
    return index.clamp_(max=masses.shape[-1] - 1)


# -- the loop over time steps ------------------------------------------------------------------------------------------


class Completion(NamedTuple):
    """A row's `tokens [t]` and their `logprobs [t]` on the CPU; `truncated`: it ended without a stop token."""

    tokens: Tensor
    logprobs: Tensor
    truncated: bool


@torch.no_grad()
def complete(
    model: nn.Module,
    prompts: Sequence[Tensor],
    uniforms: Tensor,
    budgets: Tensor,
    stop_tokens: Tensor,
    rule: SamplingParams,
    pad_id: int,
    forwards: type[RowForward],
) -> list[Completion]:
    """Complete each of the `n` `prompts`, 1-D int64 on the CPU, until one of `stop_tokens [e]`, which is included.

    `uniforms [n, T]`: float64 random numbers (`[n, 0]` for greedy). `budgets [n]`: the maximum new tokens of each row,
    at least 1. `forwards`: how the model computes these rows. `model` must be in evaluation mode. Computes no
    gradients, but does not use inference mode: a buffer that the model creates in it could not be used in training
    afterwards.

    On a CPU, finished rows are looked for after each token; elsewhere every 16, because the host has to wait for it.
    """
    device = next(model.parameters()).device
    # rows that have used up their budget must stop: the model may have no further positions
    expiring = set(budgets.tolist())
    longest, count = max(expiring), len(prompts)
    uniforms, budgets, stop_tokens = (tensor.to(device) for tensor in (uniforms, budgets, stop_tokens))
    check_every = 1 if device.type == "cpu" else _CHECK_EVERY
    forward = forwards(model, prompts, pad_id, longest, device)
    logits = forward.prefill()
    tokens = torch.full((count, longest), pad_id, dtype=torch.int64, device=device)
    logprobs = torch.zeros((count, longest), dtype=torch.float32, device=device)
    rows, left = torch.arange(count, device=device), budgets
    finished = torch.zeros(count, dtype=torch.bool, device=device)
    for step in range(longest):
        draws = None if rule.greedy else uniforms[rows, step]
        chosen, chosen_logprobs = choose(logits, draws, rule)
        tokens[rows, step], logprobs[rows, step] = chosen, chosen_logprobs
        finished |= (chosen[:, None] == stop_tokens).any(-1) | (left <= step + 1)
        if step + 1 == longest:
            break
        if (step + 1) % check_every == 0 or step + 1 in expiring:
            # finished rows that are still in the batch go on; what they sample is cut off at the end
            keep = (~finished).cpu().nonzero().squeeze(-1)
            if not len(keep):
                break
            if (len(rows) - len(keep)) * _COMPACTION_RATIO >= len(rows) or step + 1 in expiring:
                keep = keep.to(device)
                forward.keep(keep)
                rows, left, finished, chosen = rows[keep], left[keep], finished[keep], chosen[keep]
        logits = forward.advance(chosen)
    positions = torch.arange(longest, device=device)
    is_end = torch.isin(tokens, stop_tokens) & (positions < budgets[:, None])
    ended = is_end.any(-1)
    lengths = torch.where(ended, is_end.int().argmax(-1) + 1, budgets).tolist()
    completed = zip(tokens.cpu(), logprobs.cpu(), lengths, (~ended).tolist(), strict=True)
    return [Completion(ids[:length], scores[:length], truncated) for ids, scores, length, truncated in completed]
