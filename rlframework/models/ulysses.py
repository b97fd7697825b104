"""Context parallelism by heads (Ulysses): each rank computes a shard of every sequence, and attention for some heads.

Sharding and gathering of values and gradients are those of `context_parallel`; the attention differs and is registered
in `transformers.AttentionInterface` under `HEADS`. Queries, keys and values are exchanged (all-to-all), so that a rank
has all tokens of its heads and computes ordinary attention; the results are exchanged back. A rank keeps `1 / size` of
the keys and values until the backward, whereas gathering keeps all of them, and its traffic does not grow with the
number of ranks. `size` must divide the number of heads; key-value heads are repeated if there are fewer than ranks.

Does not cover the exchange itself, which the engine supplies (`Exchange`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlframework.interfaces.data_processor import Microbatch
from rlframework.models.attention import Segments, causal_attention, require_plain_scores, segment_attention
from rlframework.models.context_parallel import CANNOT, REMEDY, ContextParallel, ContextShard, QueryBlock

HEADS = "rlframework_head_exchange"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Exchange = Callable[[Attend, Tensor, Tensor, Tensor], Tensor]
"""`exchange(attend, query, key, value)` maps `[b, l, heads, D]` of this rank's columns to an output like `query`.

`attend` takes `[b, size * l, heads / size, D]`, the columns in rank order, and returns the same shape.
"""


@dataclass
class HeadShard(ContextShard):
    """A shard with attention by heads; `segments`: the sequences of a packed row, None for padded rows."""

    exchange: Exchange = field(kw_only=True)
    segments: Segments | None = field(kw_only=True)

    def in_row_order(self, tensor: Tensor) -> Tensor:
        """Reorder `[b, L, ...]` from rank order, an early and a late chunk per rank, to row order."""
        early, late = tensor.unflatten(1, (self.size, 2, -1)).unbind(2)
        return torch.cat((early, late.flip(1)), 1).flatten(1, 2)

    def in_rank_order(self, tensor: Tensor) -> Tensor:
        """Invert `in_row_order`."""
        early, late = tensor.unflatten(1, (2 * self.size, -1)).tensor_split(2, 1)
        return torch.stack((early, late.flip(1)), 2).flatten(1, 3)


class HeadExchange(ContextParallel):
    """Shards each sequence over the ranks of `group`, which exchange heads through `exchange`."""

    attention = HEADS

    def __init__(self, group: dist.ProcessGroup, exchange: Exchange) -> None:
        super().__init__(group)
        self._exchange = exchange

    def shard(self, microbatch: Microbatch) -> HeadShard:
        """See `ContextParallel.shard`."""
        bounds = microbatch.cu_seqlens
        segments = None if bounds is None else Segments(bounds.tolist())
        return HeadShard(**vars(super().shard(microbatch)), exchange=self._exchange, segments=segments)


def head_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context_shard: HeadShard,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention of this rank's queries to the keys of all ranks, within each sequence.

    `query [b, heads, l, D]`, `key` and `value [b, kv_heads, l, D]` of this rank's columns. Returns `[b, l, heads, D]`.
    """
    require_plain_scores(softcap, s_aux, CANNOT, REMEDY)
    shard = context_shard

    def attend(*exchanged: Tensor) -> Tensor:
        q, k, v = (shard.in_row_order(tensor).transpose(1, 2) for tensor in exchanged)
        if shard.segments is not None:
            options: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}
            return shard.in_rank_order(segment_attention(module, q, k, v, None, segments=shard.segments, **options)[0])
        length = q.shape[2]  # of padded rows, one sequence each
        plain = sliding_window is None or length <= sliding_window
        mask = None if plain else shard.mask(QueryBlock(length, length, 0), sliding_window)
        return shard.in_rank_order(causal_attention(q, k, v, mask, scaling, dropout))

    if key.shape[1] < shard.size:  # so that each rank has its own
        key, value = (tensor.repeat_interleave(shard.size // tensor.shape[1], 1) for tensor in (key, value))
    return shard.exchange(attend, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), None


def register() -> None:
    """Register the attention with transformers; repeated calls are harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(HEADS, head_attention)
