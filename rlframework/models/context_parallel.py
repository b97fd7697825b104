"""Context parallelism: each rank computes a shard of every sequence, with the keys and values of the full sequence.

One mechanism on every device, for padded and packed rows: an attention function registered in
`transformers.AttentionInterface` under `CONTEXT` gathers keys and values along the sequence; its backward
reduce-scatters their gradients. With `size` ranks a row is divided into `2 * size` chunks, and rank r computes chunks r
and `2 * size - 1 - r`, which balances the work of causal attention. Targets are shifted before sharding (a microbatch
has its head positions), each rank runs the head at its own positions, and the head's values are gathered: `step` sees
the full microbatch on every rank, and the gradient of each value goes once to the rank that computed it. So the
gradient of a weight is the sum over ranks.

Does not cover exchanging heads instead of keys, which is in `ulysses`, or freeing the gathered keys until the backward,
which is up to `activation_checkpointing`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlframework.interfaces.data_processor import Microbatch
from rlframework.models.attention import causal_attention, require_plain_scores, visible_keys
from rlframework.policy.head.patch import HeadPatch
from rlframework.policy.head.request import HeadRequest

CONTEXT = "rlframework_context"
CANNOT = "context parallelism (policy.parallelism.context) does not support"
REMEDY = "set policy.parallelism.context to 1"
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# -- the shards of a row -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class QueryBlock:
    """Queries whose attention is computed in one call: `count` adjacent groups of `queries` queries and `keys` keys.

    `first_key`: the column of the first key. The last query attends up to the last key; with as many keys as queries
    that is plain causal attention.
    """

    queries: int
    keys: int
    first_key: int
    count: int = 1


@dataclass
class ContextShard:
    """This rank's shard of rows `[n, L]` divided among the `size` ranks of `group`: `columns [l]`, in query blocks."""

    group: dist.ProcessGroup
    size: int
    columns: Tensor
    query_blocks: tuple[QueryBlock, ...]
    masks: dict[tuple[int, int, int | None], Tensor] = field(default_factory=dict)
    """Masks of query blocks that do not begin with their sequence; the same in all layers."""

    def mask(self, block: QueryBlock, window: int | None) -> Tensor:
        """Return `visible_keys` of `block`."""
        key = (block.queries, block.keys, window)
        if key not in self.masks:
            self.masks[key] = visible_keys(*key, self.columns.device)
        return self.masks[key]


def ranges(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Return the (start, end) columns that `rank` computes in rows of `length`, a multiple of `2 * size`."""
    chunk = length // (2 * size)
    early = rank * chunk, (rank + 1) * chunk
    late = (2 * size - 1 - rank) * chunk, (2 * size - rank) * chunk
    return [(early[0], late[1])] if early[1] == late[0] else [early, late]


def query_blocks(bounds: Sequence[int], columns: Sequence[tuple[int, int]]) -> tuple[QueryBlock, ...]:
    """Return the attention calls for the (start, end) `columns` of a row whose sequences have these `bounds`."""
    blocks: list[QueryBlock] = []
    for (first, last), (start, end) in product(columns, pairwise(bounds)):
        begin, stop = max(start, first), min(end, last)
        if begin >= stop:
            continue
        before, block = blocks[-1] if blocks else None, QueryBlock(stop - begin, stop - start, start)
        # adjacent full sequences of equal length share one call
        if before and block == QueryBlock(before.keys, before.queries, before.first_key + before.count * before.keys):
            blocks[-1] = replace(before, count=before.count + 1)
        else:
            blocks.append(block)
    return tuple(blocks)


class ContextParallel:
    """Shards each sequence over the ranks of `group`."""

    attention: ClassVar[str] = CONTEXT
    """The `transformers.AttentionInterface` name of the attention that models use."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)

    @property
    def pad_multiple(self) -> int:
        """The multiple that lengths are padded to, so that chunks have equal size."""
        return 2 * self.size

    def forward(self, model: Any, patch: HeadPatch, microbatch: Microbatch, head: HeadRequest) -> Tensor:
        """Return the values of `patch` at all head positions of `microbatch`, `[N, ...]` on every rank."""
        inputs = microbatch.processed_inputs
        shard = self.shard(microbatch)
        assert inputs.position_ids is not None
        own, positions = self._own_positions(microbatch.head_positions, inputs.seq_len)
        with patch.computing(head, positions, microbatch.targets[own]):
            values = model(
                input_ids=inputs.input_ids[:, shard.columns],
                position_ids=inputs.position_ids[:, shard.columns],
                use_cache=False,
                context_shard=shard,
            ).logits
        # All ranks compute the same loss from the result, so each keeps the gradient of its own values only.
        whole: Tensor = values.new_zeros((len(microbatch.head_positions), *values.shape[1:]))
        whole.index_copy_(0, own, values.detach())
        dist.all_reduce(whole, group=self.group)
        return whole.index_copy(0, own, values)

    def shard(self, microbatch: Microbatch) -> ContextShard:
        """Return this rank's shard of the rows of `microbatch`."""
        inputs, bounds = microbatch.processed_inputs, microbatch.cu_seqlens
        own = ranges(inputs.seq_len, self.rank, self.size)
        columns = torch.cat([torch.arange(*chunk) for chunk in own]).to(inputs.input_ids.device)
        row = [0, inputs.seq_len] if bounds is None else bounds.tolist()
        return ContextShard(self.group, self.size, columns, query_blocks(row, own))

    def _own_positions(self, head_positions: Tensor, length: int) -> tuple[Tensor, Tensor]:
        """Return the indices `[n]` of this rank's `head_positions [N]` in rows of `length`, and their places there.

        Both the head positions and the places, in this rank's shard, are flat.
        """
        chunk = length // (2 * self.size)
        row, column = head_positions // length, head_positions % length
        number = column // chunk
        own = (torch.minimum(number, 2 * self.size - 1 - number) == self.rank).nonzero()[:, 0]
        places = row * (2 * chunk) + (number >= self.size) * chunk + column % chunk
        return own, places[own]


# -- attention ---------------------------------------------------------------------------------------------------------


class _GatherSequence(torch.autograd.Function):
    """Gather `[b, h, l, D]` of each rank to `[b, h, L, D]` in row order; backward, reduce-scatter the gradients."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, shard: ContextShard) -> Tensor:
        ctx.shard = shard
        batch, heads, length, width = local.shape
        gathered = local.new_empty((shard.size, batch, heads, 2, length // 2, width))
        all_gather(gathered.flatten(0, 1), local.contiguous().view(gathered.shape[1:]), group=shard.group)
        early, late = gathered.unbind(3)  # chunks 0, 1, ... and chunks 2 * size - 1, 2 * size - 2, ...
        chunks = torch.cat((early, late.flip(0)))
        return chunks.permute(1, 2, 0, 3, 4).reshape(batch, heads, shard.size * length, width)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        shard, (grad,) = ctx.shard, grads
        batch, heads, length, width = grad.shape
        chunks = grad.reshape(batch, heads, 2 * shard.size, -1, width).permute(2, 0, 1, 3, 4)
        early, late = chunks.tensor_split(2)
        by_rank = torch.stack((early, late.flip(0)), 3)  # [size, b, h, 2, chunk, D]
        own = grad.new_empty(by_rank.shape[1:])
        reduce_scatter(own, by_rank.flatten(0, 1), group=shard.group)
        return own.view(batch, heads, length // shard.size, width), None


def context_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    context_shard: ContextShard,
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
    gathered = _GatherSequence.apply(torch.cat((key, value), -1), context_shard)  # type: ignore[no-untyped-call]
    keys, values = gathered.split((key.shape[-1], value.shape[-1]), -1)
    outputs = []
    sizes = [block.queries * block.count for block in context_shard.query_blocks]
    for block, queries in zip(context_shard.query_blocks, query.split(sizes, 2), strict=True):
        visible = slice(block.first_key, block.first_key + block.keys * block.count)
        window = None if sliding_window is None or block.keys <= sliding_window else sliding_window
        plain = window is None and block.queries == block.keys
        output = causal_attention(
            _as_batch(queries, block.count),
            _as_batch(keys[:, :, visible], block.count),
            _as_batch(values[:, :, visible], block.count),
            None if plain else context_shard.mask(block, window),
            scaling,
            dropout,
        )
        outputs.append(output.reshape(query.shape[0], -1, query.shape[1], value.shape[-1]))
    return torch.cat(outputs, 1), None


def _as_batch(tensor: Tensor, count: int) -> Tensor:
    """Reshape `[1, heads, count * length, D]` to `[count, heads, length, D]`; unchanged for a single sequence."""
    return tensor if count == 1 else tensor.squeeze(0).unflatten(1, (count, -1)).transpose(0, 1)


def register() -> None:
    """Register the attention with transformers; repeated calls are harmless."""
    from transformers import AttentionInterface

    AttentionInterface.register(CONTEXT, context_attention)
