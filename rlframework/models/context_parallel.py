"""Context parallelism: each rank computes a part of every sequence, and sees the keys and values of all of it.

One mechanism on every device, for padded and packed rows: an attention registered in `transformers.AttentionInterface`
under `CONTEXT` that gathers keys and values along the sequence; the backward adds each rank's gradients of them up
where they belong. With `size` ranks a row is cut into `2 * size` chunks, and rank r computes chunks r and
`2 * size - 1 - r`, so that under causal attention all ranks have the same work. Targets are shifted before that (a
microbatch comes with its head positions), each rank runs the head at its own, and the head's values are gathered:
`step` sees the whole microbatch on every rank, and the gradient of each value goes to the rank that computed it, once.
So the gradient of a weight is the sum over ranks.

Left out: exchanging heads instead of keys, which is `head_exchange`, and keeping the gathered keys out of memory until
the backward: `activation_checkpointing` does that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlframework.interfaces.data_processor import Microbatch
from rlframework.models.attention import require_plain_scores
from rlframework.models.context_limits import CANNOT, REMEDY
from rlframework.policy.head.patch import HeadPatch
from rlframework.policy.head.request import HeadRequest

CONTEXT = "rlframework_context"
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# -- which part of a row is whose --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Queries that are attended to in one call: `count` neighbours of as many queries and keys each.

    `first_key`: where the keys begin in the row. The last query sees the last key; with as many keys as queries that
    is plain causal attention.
    """

    queries: int
    keys: int
    first_key: int
    count: int = 1


@dataclass
class Share:
    """What this rank computes of rows `[n, L]` that the `size` ranks of `group` share: `columns [l]`, by `pieces`."""

    group: dist.ProcessGroup
    size: int
    columns: Tensor
    pieces: tuple[Piece, ...]
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)
    """Masks of the pieces whose queries do not begin where their sequence does: the same in all layers."""

    def mask(self, piece: Piece, window: int | None) -> Tensor:
        """`[queries, keys]` bool: each query sees the keys up to its own, `window` of them where that is given."""
        key = (piece.queries, piece.keys, window)
        if key not in self.masks:
            offset = piece.keys - piece.queries
            seen = torch.ones(piece.queries, piece.keys, dtype=torch.bool, device=self.columns.device).tril(offset)
            self.masks[key] = seen if window is None else seen.triu(offset + 1 - window)
        return self.masks[key]


def ranges(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """First and end column of what `rank` computes of rows of `length`, a multiple of `2 * size`."""
    chunk = length // (2 * size)
    parts = [(rank * chunk, (rank + 1) * chunk), ((2 * size - 1 - rank) * chunk, (2 * size - rank) * chunk)]
    return [(parts[0][0], parts[1][1])] if parts[0][1] == parts[1][0] else parts


def pieces(bounds: Sequence[int], parts: Sequence[tuple[int, int]]) -> tuple[Piece, ...]:
    """The attention of the columns `parts` of a row whose sequences have these `bounds`."""
    found: list[Piece] = []
    for first, last in parts:
        for start, end in pairwise(bounds):
            begin, stop = max(start, first), min(end, last)
            if begin < stop:
                _append(found, Piece(stop - begin, stop - start, start))
    return tuple(found)


def _append(found: list[Piece], piece: Piece) -> None:
    """Add `piece`, to the one before it where both are whole sequences of one length, side by side."""
    before = found[-1] if found else None
    if (
        before is not None
        and before.queries == before.keys == piece.queries == piece.keys
        and piece.first_key == before.first_key + before.count * before.keys
    ):
        found[-1] = replace(before, count=before.count + 1)
    else:
        found.append(piece)


class ContextParallel:
    """The ranks of `group` share each sequence."""

    attention: ClassVar[str] = CONTEXT
    """What of `transformers.AttentionInterface` models have meanwhile."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    @property
    def pad_multiple(self) -> int:
        """What lengths are padded to: chunks must be of one size."""
        return 2 * self.size

    def forward(self, model: Any, patch: HeadPatch, microbatch: Microbatch, head: HeadRequest) -> Tensor:
        """What `patch` computes at all head positions of `microbatch`, `[N, ...]` on every rank; see the module."""
        inputs = microbatch.processed_inputs
        share = self.share(microbatch)
        assert inputs.position_ids is not None
        place = self._place(microbatch.head_positions, inputs.seq_len)
        with patch.computing(head, place.positions, microbatch.targets[place.own]):
            values = model(
                input_ids=inputs.input_ids[:, share.columns],
                position_ids=inputs.position_ids[:, share.columns],
                use_cache=False,
                context_share=share,
            ).logits
        gathered: Tensor = _GatherValues.apply(values, place, self.group)  # type: ignore[no-untyped-call]
        return gathered

    def share(self, microbatch: Microbatch) -> Share:
        """What this rank computes of the rows of `microbatch`."""
        inputs, bounds = microbatch.processed_inputs, microbatch.cu_seqlens
        parts = ranges(inputs.seq_len, self.rank, self.size)
        columns = torch.cat([torch.arange(*part) for part in parts]).to(inputs.input_ids.device)
        row = [0, inputs.seq_len] if bounds is None else bounds.tolist()
        return Share(self.group, self.size, columns, pieces(row, parts))

    def _place(self, head_positions: Tensor, length: int) -> Place:
        """Which rank has each of the flat `head_positions [N]` into rows of `length`, and where."""
        chunk = length // (2 * self.size)
        row, column = head_positions // length, head_positions % length
        number = column // chunk
        owner = torch.minimum(number, 2 * self.size - 1 - number)
        local = row * (2 * chunk) + (number >= self.size) * chunk + column % chunk
        counts = torch.bincount(owner, minlength=self.size)
        most = max(int(counts.max()), 1)
        order = owner.argsort(stable=True)  # by rank
        within = torch.empty_like(order)
        starts = counts.cumsum(0) - counts
        within[order] = torch.arange(len(order), device=order.device) - starts[owner[order]]
        own = (owner == self.rank).nonzero()[:, 0]
        return Place(own, local[own], owner * most + within, most)


@dataclass(frozen=True)
class Place:
    """Where the N head positions of a microbatch are computed.

    `own [n]`: which of them here, at the flat `positions [n]` of this rank's part; `source [N]`: where each is among
    the values of all ranks, `most` of each.
    """

    own: Tensor
    positions: Tensor
    source: Tensor
    most: int


class _GatherValues(torch.autograd.Function):
    """`[n, ...]` of each rank to `[N, ...]` on all; back, each rank takes the gradient of its own.

    All ranks compute the same loss from it: adding their gradients up would count each of them `size` times.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, place: Place, group: dist.ProcessGroup) -> Tensor:
        ctx.own = place.own
        sent = values.new_zeros((place.most, *values.shape[1:]))
        sent[: len(values)] = values
        gathered = values.new_empty((dist.get_world_size(group) * place.most, *values.shape[1:]))
        all_gather(gathered, sent, group=group)
        return gathered[place.source]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0][ctx.own], None, None


# -- attention ---------------------------------------------------------------------------------------------------------


class _GatherSequence(torch.autograd.Function):
    """`[b, h, l, D]` of each rank to the whole `[b, h, L, D]` in the order of the row; back, the sum of gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, share: Share) -> Tensor:
        ctx.share = share
        batch, heads, length, width = local.shape
        gathered = local.new_empty((share.size, batch, heads, 2, length // 2, width))
        all_gather(gathered.flatten(0, 1), local.contiguous().view(gathered.shape[1:]), group=share.group)
        early, late = gathered.unbind(3)  # chunks 0, 1, ... and the last, the last but one, ...
        chunks = torch.cat((early, late.flip(0)))
        return chunks.permute(1, 2, 0, 3, 4).reshape(batch, heads, share.size * length, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        share, (grad,) = ctx.share, grads
        batch, heads, length, width = grad.shape
        chunks = grad.reshape(batch, heads, 2 * share.size, -1, width).permute(2, 0, 1, 3, 4)
        early, late = chunks.tensor_split(2)
        parts = torch.stack((early, late.flip(0)), 3)  # [size, b, h, 2, chunk, D]
        own = grad.new_empty(parts.shape[1:])
        reduce_scatter(own, parts.flatten(0, 1), group=share.group)
        return own.view(batch, heads, length // share.size, width), None


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context_share: Share,
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
    together = _GatherSequence.apply(torch.cat((key, value), -1), context_share)  # type: ignore[no-untyped-call]
    keys, values = together.split((key.shape[-1], value.shape[-1]), -1)
    outputs = []
    sizes = [piece.queries * piece.count for piece in context_share.pieces]
    for piece, part in zip(context_share.pieces, query.split(sizes, 2), strict=True):
        seen = slice(piece.first_key, piece.first_key + piece.keys * piece.count)
        window = None if sliding_window is None or piece.keys <= sliding_window else sliding_window
        plain = window is None and piece.queries == piece.keys
        output = nn.functional.scaled_dot_product_attention(
            _one_by_one(part, piece.count),
            _one_by_one(keys[:, :, seen], piece.count),
            _one_by_one(values[:, :, seen], piece.count),
            attn_mask=None if plain else context_share.mask(piece, window),
            is_causal=plain,
            dropout_p=dropout,
            scale=scaling,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        outputs.append(output.transpose(1, 2).reshape(query.shape[0], -1, query.shape[1], value.shape[-1]))
    return torch.cat(outputs, 1), None


def _one_by_one(part: Tensor, count: int) -> Tensor:
    """`[1, heads, count * length, D]` as `[count, heads, length, D]`; as it is where there is one sequence."""
    return part if count == 1 else part.squeeze(0).unflatten(1, (count, -1)).transpose(0, 1)


def register() -> None:
    """Make the attention known to transformers; again is harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(CONTEXT, context_attention)
