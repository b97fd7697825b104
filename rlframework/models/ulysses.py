"""Context parallelism by heads (Ulysses): each rank computes a part of every sequence, and attends with some heads.

Beside `context_parallel`, from which it has who computes what, and how values and gradients come together; attention
differs, registered in `transformers.AttentionInterface` under `HEADS`. Queries, keys and values are exchanged, so that
a rank has all tokens of its heads; it attends as one that is alone, and the results are exchanged back. A rank keeps
`1 / size` of the keys and values until the backward, where gathering keeps all of them, and sends no more the more
ranks there are. It needs heads that `size` divides; where there are fewer key-value heads than ranks they are repeated.

Left out: the exchange itself, which comes with an engine (`Exchange`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlframework.interfaces.data_processor import Microbatch
from rlframework.models.attention import Segments, require_plain_scores, segment_attention
from rlframework.models.context_limits import CANNOT, REMEDY
from rlframework.models.context_parallel import ContextParallel, Piece, Share

HEADS = "rlframework_head_exchange"
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
Exchange = Callable[[Attend, Tensor, Tensor, Tensor], Tensor]
"""`exchange(attend, query, key, value)`, each `[b, l, heads, D]` of this rank's columns, to an output such as `query`.

`attend` gets `[b, size * l, heads / size, D]`, the columns of the ranks one after the other, and gives such an output.
"""


@dataclass
class HeadShare(Share):
    """A `Share` whose attention is by heads; `segments`: the sequences of a packed row, None for padded rows."""

    exchange: Exchange = field(kw_only=True)
    segments: Segments | None = field(kw_only=True)

    def in_row_order(self, part: Tensor) -> Tensor:
        """`[b, L, ...]` in the order of the ranks, each of which has an early and a late chunk, in that of the row."""
        early, late = part.unflatten(1, (self.size, 2, -1)).unbind(2)
        return torch.cat((early, late.flip(1)), 1).flatten(1, 2)

    def in_rank_order(self, part: Tensor) -> Tensor:
        """What `in_row_order` was made of."""
        early, late = part.unflatten(1, (2 * self.size, -1)).tensor_split(2, 1)
        return torch.stack((early, late.flip(1)), 2).flatten(1, 3)


class HeadExchange(ContextParallel):
    """The ranks of `group` share each sequence, and exchange heads by `exchange`."""

    attention = HEADS

    def __init__(self, group: dist.ProcessGroup, exchange: Exchange) -> None:
        super().__init__(group)
        self._exchange = exchange

    def share(self, microbatch: Microbatch) -> HeadShare:
        """See `ContextParallel.share`."""
        given, bounds = super().share(microbatch), microbatch.cu_seqlens
        segments = None if bounds is None else Segments(bounds.tolist())
        return HeadShare(
            given.group, given.size, given.columns, given.pieces, exchange=self._exchange, segments=segments
        )


def head_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context_share: HeadShare,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Causal attention of this rank's queries to the keys of all ranks, within each sequence.

    `query [b, heads, l, D]`, `key` and `value [b, kv_heads, l, D]` of this rank's columns. Returns `[b, l, heads, D]`.
    """
    require_plain_scores(softcap, s_aux, CANNOT, REMEDY)
    share = context_share
    how: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "sliding_window": sliding_window}

    def attend(*parts: Tensor) -> Tensor:
        q, k, v = (share.in_row_order(part).transpose(1, 2) for part in parts)
        if share.segments is None:
            return share.in_rank_order(_causal(q, k, v, share, **how))
        return share.in_rank_order(segment_attention(module, q, k, v, None, segments=share.segments, **how)[0])

    key, value = (_for_each_rank(part, share.size) for part in (key, value))
    return share.exchange(attend, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)), None


def _for_each_rank(part: Tensor, size: int) -> Tensor:
    """`[b, kv_heads, l, D]` with at least `size` heads: each is repeated for the ranks whose queries go to it."""
    return part if part.shape[1] >= size else part.repeat_interleave(size // part.shape[1], 1)


def _causal(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    share: HeadShare,
    *,
    scaling: float | None,
    dropout: float,
    sliding_window: int | None,
) -> Tensor:
    """Of padded rows, each a sequence: `[b, heads, L, D]` to `[b, L, heads, D]`."""
    length = query.shape[2]
    window = None if sliding_window is None or length <= sliding_window else sliding_window
    output = nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=None if window is None else share.mask(Piece(length, length, 0), window),
        is_causal=window is None,
        dropout_p=dropout,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2)


def register() -> None:
    """Make the attention known to transformers; again is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(HEADS, head_attention)
