"""Run a microbatch through a transformers model: padded rows, a packed row, or this rank's shard of either.

Context parallelism shards the rows over `size` ranks. A row is divided into `2 * size` chunks, and rank r computes
chunks r and `2 * size - 1 - r`, which balances the work of causal attention. The ranks attend in one of two ways:

- `ContextShard` gathers keys and values along the sequence; its backward reduce-scatters their gradients.
- `HeadShard` (Ulysses) exchanges queries, keys and values (all-to-all), so that a rank has all tokens of some heads,
  and exchanges the results back. A rank keeps `1 / size` of the keys and values until the backward, and its traffic
  does not grow with `size`, which must divide the number of heads; key-value heads are repeated if there are fewer.

Each rank runs the head at its own positions, and the values are gathered: `step` sees the full microbatch on every
rank, and the gradient of each value goes once to the rank that computed it. So the gradient of a weight is the sum over
ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import accumulate, pairwise, product
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from rlframework.batch.batch_rows import copy_to
from rlframework.interfaces.data_processor import Microbatch
from rlframework.models.attention import PaddedRows, RowLayout, Segments, attention, chunk_sizes
from rlframework.models.rotary import length_dependent, lengths_given, positions_without_padding, sequence_lengths
from rlframework.models.varlen import PLAIN, KernelCall, Scores, varlen_usable
from rlframework.policy.head.patch import HeadPatch, HeadRequest

GRIDS = ("image_grid_thw", "video_grid_thw")
TYPES = "mm_token_type_ids"


def packed_positions(model: Any, microbatch: Microbatch) -> Tensor:
    """Return the positions of the packed row of `microbatch`: `[1, L]`, or `[3, 1, L]` with patches numbered in 3-D.

    Such positions (M-RoPE, Wang et al. 2024, arXiv:2409.12191) depend on the images of a sequence, so each sequence of
    a packed row has its own. The model computes them itself for padded rows. Other kinds number all tokens one by one.
    They are computed in CPU memory, so that nothing waits for the device.
    """
    inputs = (microbatch.host or microbatch).processed_inputs
    position_ids = microbatch.processed_inputs.position_ids
    assert position_ids is not None
    numbering = getattr(getattr(getattr(model, "module", model), "model", None), "get_rope_index", None)
    grids = {name: inputs.vlm_kwargs[name] for name in GRIDS if name in inputs.vlm_kwargs}
    if numbering is None or not grids:
        return position_ids
    assert microbatch.cu_seqlens is not None
    sizes = microbatch.cu_seqlens.diff().tolist()
    ids, types = (pad_sequence(row[0].split(sizes), True) for row in (inputs.input_ids, inputs.vlm_kwargs[TYPES]))
    real = torch.arange(ids.shape[1]) < torch.tensor(sizes)[:, None]
    positions, _ = numbering(ids, types, attention_mask=real, **grids)
    return copy_to(positions[:, real][:, None], position_ids.device)


Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""`attend(query, key, value)` returns the attention of the queries, of their shape."""
Exchange = Callable[[Attend, Tensor, Tensor, Tensor], Tensor]
"""`exchange(attend, query, key, value)` maps `[b, l, heads, D]` of this rank's columns to an output like `query`.

`attend` takes `[b, size * l, heads / size, D]`, the columns in rank order, and returns the same shape.
"""
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor  # the name before torch 2.13
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def attending(
    config: Any, microbatch: Microbatch, context: ContextParallel | None, *, replace_padded: bool = False
) -> AbstractContextManager[None]:
    """Switch a model of `config` to the attention that `microbatch` needs, padded rows too with `replace_padded`.

    Must also enclose the backward, where activation checkpointing runs the attention again.
    """
    replaced = context is not None or microbatch.cu_seqlens is not None or replace_padded
    return attention(config) if replaced else nullcontext()


def forward(
    model: Any,
    patch: HeadPatch,
    microbatch: Microbatch,
    head: HeadRequest,
    context: ContextParallel | None,
    *,
    replace_padded: bool = False,
) -> Tensor:
    """Return the values of `patch` at all head positions of `microbatch`, `[N, ...]`. Call within `attending`.

    `context`: shards each sequence over ranks; None without context parallelism.
    """
    if context is not None:
        return context.forward(model, patch, microbatch, head)
    processed = microbatch.processed_inputs
    inputs: dict[str, Any] = {"input_ids": processed.input_ids, "use_cache": False, **processed.vlm_kwargs}
    if microbatch.cu_seqlens is not None:
        bounds = microbatch.cu_seqlens.tolist()
        inputs |= {"position_ids": packed_positions(model, microbatch), "row_layout": Segments(bounds)}
    elif length_dependent(config_of(model)):
        assert processed.position_ids is not None
        lengths = microbatch.data_dict["input_lengths"]
        inputs["position_ids"] = positions_without_padding(processed.position_ids, lengths)
    if replace_padded and microbatch.cu_seqlens is None:
        inputs["row_layout"] = PaddedRows()
    with patch.computing(head, microbatch.head_positions, microbatch.targets):
        values: Tensor = model(**inputs).logits
    return values


class ContextParallel:
    """Shards each sequence over the ranks of `group`, which gather keys, or exchange heads through `exchange`."""

    def __init__(self, group: dist.ProcessGroup, exchange: Exchange | None = None) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(group), dist.get_world_size(group)
        self._exchange = exchange
        self.pad_multiple = 2 * self.size  # lengths are padded to a multiple of it, so that chunks have equal size

    def forward(self, model: Any, patch: HeadPatch, microbatch: Microbatch, head: HeadRequest) -> Tensor:
        """Return the values of `patch` at all head positions of `microbatch`, `[N, ...]` on every rank."""
        inputs = microbatch.processed_inputs
        shard = self.shard(microbatch)
        assert inputs.position_ids is not None
        on_host = microbatch if microbatch.host is None else microbatch.host  # where counting them does not wait
        indices = self._own_positions(on_host.head_positions, inputs.seq_len)
        own, positions = (copy_to(part, inputs.input_ids.device) for part in indices)
        rotary = rotary_lengths(model, microbatch, shard.columns)
        with patch.computing(head, positions, microbatch.targets[own]), rotary:
            values = model(
                input_ids=inputs.input_ids[:, shard.columns],
                position_ids=inputs.position_ids[:, shard.columns],
                use_cache=False,
                row_layout=shard,
            ).logits
        # All ranks compute the same loss from the result, so each keeps the gradient of its own values only.
        whole: Tensor = values.new_zeros((len(microbatch.head_positions), *values.shape[1:]))
        whole.index_copy_(0, own, values.detach())
        dist.all_reduce(whole, group=self.group)
        return whole.index_copy(0, own, values)

    def shard(self, microbatch: Microbatch) -> ContextShard | HeadShard:
        """Return this rank's shard of the rows of `microbatch`."""
        inputs = microbatch.processed_inputs
        bounds = None if microbatch.cu_seqlens is None else microbatch.cu_seqlens.tolist()
        own = ranges(inputs.seq_len, self.rank, self.size)
        columns = copy_to(torch.cat([torch.arange(*chunk) for chunk in own]), inputs.input_ids.device)
        if self._exchange is not None:
            segments = None if bounds is None else Segments(bounds)
            return HeadShard(self.rank, self.size, columns, self._exchange, segments)
        return ContextShard(self.size, columns, self.group, own, bounds or [0, inputs.seq_len])

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


def rotary_lengths(model: Any, microbatch: Microbatch, columns: Tensor) -> AbstractContextManager[None]:
    """Give rotary embeddings of `model` that need them the lengths of the sequences whose `columns` it computes.

    A function in place of a model has none: its backend rejects such models in context parallelism.
    """
    if not isinstance(model, nn.Module) or not length_dependent(config_of(model)):
        return nullcontext()
    positions = microbatch.processed_inputs.position_ids
    assert positions is not None
    if microbatch.cu_seqlens is None:
        positions = positions_without_padding(positions, microbatch.data_dict["input_lengths"])
    return lengths_given(model, sequence_lengths(positions)[:, columns])


def config_of(model: Any) -> Any:
    """Return the configuration of a model, also one that DeepSpeed's engine or torch's DDP wraps."""
    return getattr(model, "module", model).config


def ranges(length: int, rank: int, size: int) -> list[tuple[int, int]]:
    """Return the (start, end) columns that `rank` computes in rows of `length`, a multiple of `2 * size`."""
    chunk = length // (2 * size)
    early = rank * chunk, (rank + 1) * chunk
    late = (2 * size - 1 - rank) * chunk, (2 * size - rank) * chunk
    return [(early[0], late[1])] if early[1] == late[0] else [early, late]


# -- gathering keys and values -----------------------------------------------------------------------------------------


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


@dataclass(eq=False)
class ContextShard(RowLayout):
    """This rank's shard of rows `[n, L]` divided among the `size` ranks of `group`: `columns [l]`.

    `chunks`: their (start, end); `bounds`: of the sequences of a row. On a GPU in half precision there is one kernel
    call for each chunk, elsewhere one for each query block.
    """

    size: int
    columns: Tensor
    group: dist.ProcessGroup
    chunks: Sequence[tuple[int, int]]
    bounds: Sequence[int]

    @cached_property
    def query_blocks(self) -> tuple[QueryBlock, ...]:
        """The attention calls without the kernel."""
        return query_blocks(self.bounds, self.chunks)

    @cached_property
    def _kernel_calls(self) -> list[tuple[int, int, int, KernelCall]]:
        """For each chunk: the number of its queries, the first key and the number of keys, and the call."""
        calls = []
        for chunk in self.chunks:
            blocks = query_blocks(self.bounds, [chunk])
            queries = [block.queries for block in blocks for _ in range(block.count)]
            keys = [block.keys for block in blocks for _ in range(block.count)]  # adjacent, from the first on
            calls.append((chunk[1] - chunk[0], blocks[0].first_key, sum(keys), KernelCall(queries, keys)))
        return calls

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        """See `RowLayout.attend`: this rank's queries attend to the keys of all ranks."""
        gathered = _GatherSequence.apply(torch.cat((key, value), -1), self)  # type: ignore[no-untyped-call]
        if scores.chunk is not None:  # chunks are sequences
            shard, scores = self._of_chunks(scores.chunk), scores._replace(chunk=None)
            return shard.attend_to(query, gathered, key.shape[-1], scores)
        return self.attend_to(query, gathered, key.shape[-1], scores)

    @cached_property
    def _of_chunks(self) -> Callable[[int], ContextShard]:
        sizes = [end - start for start, end in pairwise(self.bounds)]
        return cache(lambda chunk: replace(self, bounds=[0, *accumulate(chunk_sizes(sizes, chunk))]))

    def attend_to(self, query: Tensor, gathered: Tensor, key_size: int, scores: Scores) -> Tensor:
        """Compute attention to the keys `gathered [b, kv_heads, L, D]`, of `key_size` elements, and their values."""
        widths = key_size, gathered.shape[-1] - key_size
        if varlen_usable(query, scores):
            all_keys, all_values = gathered.split(widths, -1)
            return self._with_kernel(query, all_keys, all_values, scores)
        outputs = []
        sizes = [block.queries * block.count for block in self.query_blocks]
        for block, queries in zip(self.query_blocks, query.split(sizes, 2), strict=True):
            visible = gathered.narrow(2, block.first_key, block.keys * block.count)
            keys, values = _as_batch(visible, block.count).split(widths, -1)
            output = self.causal(_as_batch(queries, block.count), keys, values, scores)
            outputs.append(output.reshape(query.shape[0], -1, query.shape[1], widths[1]))
        return torch.cat(outputs, 1)

    def _with_kernel(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores) -> Tensor:
        outputs, start = [], 0
        for queries, first, keys, call in self._kernel_calls:
            k, v = (tensor.narrow(2, first, keys) for tensor in (key, value))
            outputs.append(call.attend(query.narrow(2, start, queries), k, v, scores))
            start += queries
        return torch.cat(outputs, 1)


def _as_batch(tensor: Tensor, count: int) -> Tensor:
    """Reshape `[b, heads, count * length, D]` to `[b * count, heads, length, D]`."""
    return tensor if count == 1 else tensor.unflatten(2, (count, -1)).transpose(1, 2).flatten(0, 1)


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


# -- exchanging heads --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class HeadShard(RowLayout):
    """A shard with attention by heads; `segments`: the sequences of a packed row, None for padded rows.

    After the exchange `rank` has as many heads as each of the `size` ranks, in the order of the ranks.
    """

    rank: int
    size: int
    columns: Tensor
    exchange: Exchange
    segments: Segments | None

    def in_row_order(self, tensor: Tensor) -> Tensor:
        """Reorder `[b, L, ...]` from rank order, an early and a late chunk per rank, to row order."""
        early, late = tensor.unflatten(1, (self.size, 2, -1)).unbind(2)
        return torch.cat((early, late.flip(1)), 1).flatten(1, 2)

    def in_rank_order(self, tensor: Tensor) -> Tensor:
        """Invert `in_row_order`."""
        early, late = tensor.unflatten(1, (2 * self.size, -1)).tensor_split(2, 1)
        return torch.stack((early, late.flip(1)), 2).flatten(1, 3)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, scores: Scores = PLAIN) -> Tensor:
        """See `RowLayout.attend`: this rank's queries attend to the keys of all ranks."""
        if scores.sinks is not None:  # of this rank's heads; the other ranks add the gradients of theirs
            heads = query.shape[1] // self.size
            scores = scores._replace(sinks=scores.sinks.narrow(0, self.rank * heads, heads))
        compute = self.causal if self.segments is None else self.segments.attend  # padded rows: one sequence each

        def attend(*exchanged: Tensor) -> Tensor:
            q, k, v = (self.in_row_order(tensor).transpose(1, 2) for tensor in exchanged)
            return self.in_rank_order(compute(q, k, v, scores))

        if key.shape[1] < self.size:  # so that each rank has its own
            key, value = (tensor.repeat_interleave(self.size // tensor.shape[1], 1) for tensor in (key, value))
        return self.exchange(attend, query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2))
