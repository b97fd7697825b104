"""How attention scores are computed, and attention with scores that no kernel of torch computes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

BLOCK_SCORES = 1 << 26
"""Maximum number of scores in memory at once in `unfused`. Each takes about 20 bytes in the backward: 1.3 GB."""


class Scores(NamedTuple):
    """How scores are computed.

    `window`: the number of tokens that a token attends to, including itself. `chunk`: a token attends to those before
    it in its chunk of `chunk` tokens, counted from the start of the sequence. `softcap`: scores are squashed to
    `softcap * tanh(score / softcap)`. `sinks [heads]`: the score of a further key without a value, in each row.
    """

    scaling: float | None = None
    dropout: float = 0.0
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    @property
    def fused(self) -> bool:
        """Whether torch's `scaled_dot_product_attention` computes such scores."""
        return self.softcap is None and self.sinks is None


PLAIN = Scores()
"""Scores with nothing special: the softmax of the scaled products of queries and keys."""


def visible_keys(queries: int, keys: int, window: int | None, chunk: int | None, device: torch.device) -> Tensor:
    """Return `[queries, keys]` bool for the last `queries` of `keys` tokens.

    True for keys up to the query's own, at most the last `window` of them, in the query's `chunk`.
    """
    offset = keys - queries
    visible = torch.ones(queries, keys, dtype=torch.bool, device=device).tril(offset)
    if window is not None:
        visible = visible.triu(offset + 1 - window)
    if chunk is not None:
        chunks = torch.arange(keys, device=device) // chunk
        visible = visible & (chunks[offset:, None] == chunks)
    return visible


def unfused(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    """Compute attention `[b, heads, l, D]` of the last `l` of `k` tokens with soft caps or sinks, from scores in fp32.

    If there are more than `BLOCK_SCORES`, they are computed by blocks of queries, and again in the backward.
    """
    queries, keys = query.shape[2], key.shape[2]
    rows = max(1, BLOCK_SCORES // (query.shape[0] * query.shape[1] * keys))
    if rows >= queries:
        return _unfused_block(query, key, value, scores)
    outputs = []
    for start in range(0, queries, rows):
        stop = min(start + rows, queries)
        last = keys - queries + stop
        # the first key that the block's first query sees; chunks are counted from the first of all keys
        seen = keys if scores.window is None or scores.chunk is not None else scores.window
        first = max(0, last - (stop - start) + 1 - seen)
        parts = query[:, :, start:stop], key[:, :, first:last], value[:, :, first:last]
        outputs.append(checkpoint(_unfused_block, *parts, scores, use_reentrant=False))
    return torch.cat(outputs, 2)


def _unfused_block(query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
    mask = visible_keys(query.shape[2], key.shape[2], scores.window, scores.chunk, query.device)
    groups = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(groups, 1) if groups > 1 else tensor for tensor in (key, value))
    scaling = query.shape[-1] ** -0.5 if scores.scaling is None else scores.scaling
    products = (query @ key.transpose(2, 3)).float() * scaling
    if scores.softcap is not None:
        products = scores.softcap * torch.tanh(products / scores.softcap)
    products = products.masked_fill(~mask, -torch.inf)
    if scores.sinks is not None:
        sinks = scores.sinks.float().view(1, -1, 1, 1).expand(*products.shape[:3], 1)
        products = torch.cat((products, sinks), -1)
    return products.softmax(-1)[..., : key.shape[2]].to(value.dtype) @ value
