"""Rows of tokens as the input of a model's forward: padded, or packed into one or several rows.

`padded_inputs` and `packed_inputs` make all model inputs, on the tensors' device; the other functions have NeMo-RL's
names and arguments. Does not cover grouping rows or choosing the positions of the head, which `data_processor` does.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from numbers import Real

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch.batch_rows import describe, read_count, read_lengths, round_up
from rlframework.interfaces.data_processor import Microbatch, ProcessedInputs
from rlframework.policy.microbatches.on_demand import Made, on_device, on_host


def with_token_sets(microbatches: Sequence[Microbatch], name: str, device: torch.device) -> Sequence[Microbatch]:
    """Return `microbatches`, on `device`, with targets `[N, 1 + K]`: those they have, then the sets of their positions.

    The sets are the value `name` of their rows, `[b, S', K]`: K ids of tokens at the position of the token that is
    predicted. Engines compute what they are given targets for, so nothing else of them depends on sets.
    """
    host = on_host(microbatches)

    def make(index: int) -> Microbatch:
        microbatch = host[index]
        sets = microbatch.data_dict[name].flatten(0, 1)[microbatch.scatter].long()
        return replace(microbatch, targets=torch.cat((microbatch.targets[:, None], sets), 1))

    return on_device(Made(len(host), make), device)


def padded_inputs(input_ids: Tensor, pad_multiple: int = 1, padding_value: int = 0) -> ProcessedInputs:
    """Pad the rows `[b, S]`, of any integer dtype, on the right to a multiple of `pad_multiple`, as int64.

    Needs no mask: under causal attention no token sees the padding on its right.
    """
    input_ids = input_ids.to(torch.int64)
    rows, width = input_ids.shape
    length = round_up(width, pad_multiple)
    return ProcessedInputs(
        input_ids=pad(input_ids, (0, length - width), value=padding_value) if length > width else input_ids,
        seq_len=length,
        position_ids=torch.arange(length, device=input_ids.device).expand(rows, length),
    )


def packed_inputs(
    input_ids: Tensor, lengths: Tensor, pad_multiple: int = 1, padding_value: int = 0
) -> tuple[ProcessedInputs, Tensor]:
    """Concatenate the tokens of the rows `[b, S]` into one row `[1, L]`; return it and the bounds of the sequences.

    L is the sum of `lengths [b]`, rounded up to a multiple of `pad_multiple`; the padding is one more sequence.
    Positions restart at 0 with each sequence, and are 0 in the padding. The bounds are int32 `[b + 1]`, or `[b + 2]`
    with padding. Tokens and lengths may have any integer dtype; the model gets int64.
    """
    input_ids, lengths = input_ids.to(torch.int64), lengths.to(torch.int64)
    tokens = input_ids.masked_select(torch.arange(input_ids.shape[1], device=lengths.device) < lengths[:, None])
    bounds = pad(lengths.cumsum(0), (1, 0))
    total = len(tokens)
    tail = round_up(total, pad_multiple) - total
    starts = bounds[:-1].repeat_interleave(lengths, output_size=total)
    inputs = ProcessedInputs(
        input_ids=pad(tokens, (0, tail), value=padding_value)[None],
        seq_len=total + tail,
        position_ids=pad(torch.arange(total, device=lengths.device) - starts, (0, tail))[None],
    )
    return inputs, (torch.cat((bounds, bounds[-1:] + tail)) if tail else bounds).to(torch.int32)


def pack_sequences(
    input_ids: Tensor,
    input_lengths: Tensor,
    packed_sequence_size: Sequence[int],
    padding_value: float = 0,
    return_attention_mask: bool = True,
    min_seq_len: int = 0,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Concatenate the first `packed_sequence_size[0]` rows into packed row 0, the next `[1]` into row 1, and so on.

    `input_ids` is `[B, S]` or `[B, S, ...]` of any dtype; the first `input_lengths [B]` tokens of each row are real.
    With P packed rows and L the longest of them, but at least `min_seq_len`, returns

    - the tokens `[P, L]`, padded on the right with `padding_value`;
    - positions `[P, L]` int64, which restart at 0 with each sequence and are 0 in the padding;
    - the attention mask `[P, L, L]` bool, or None: True where the query (dimension 1) sees the key. It is
      block-diagonal and causal: a token sees its own sequence up to itself, and padding neither sees nor is seen. (In
      NeMo-RL the mask is causal over the whole row, so that a sequence sees those packed before it.)

    `unpack_tensor` is the inverse. Differentiable in `input_ids`. Raises `BatchError` for sizes that do not match.
    """
    lengths = _lengths_of(input_ids, input_lengths)
    sizes = _checked_sizes(packed_sequence_size, len(lengths))

    def packed(sequences: Iterable[Tensor], like: Tensor, value: float) -> Tensor:
        return _pad_rows(_join_groups(sequences, sizes, like), like, value, min_seq_len)

    index = torch.arange(max([*lengths, len(lengths)], default=0), device=input_ids.device)
    tokens = packed(
        (row[:length] for row, length in zip(input_ids, lengths, strict=True)), input_ids.flatten(0, 1), padding_value
    )
    positions = packed((index[:length] for length in lengths), index, 0)
    if not return_attention_mask:
        return tokens, positions, None
    sequence = packed((index[number].expand(length) for number, length in enumerate(lengths)), index, -1)
    query, key = sequence.unsqueeze(2), sequence.unsqueeze(1)
    return tokens, positions, ((query == key) & (query >= 0)).tril_()


def unpack_tensor(tensor: Tensor, input_lengths: Tensor, packed_sequence_size: Sequence[int] | None = None) -> Tensor:
    """Unpack packed rows `[P, L, ...]` into rows `[B, max(input_lengths), ...]`, padded with zeros on the right.

    `packed_sequence_size` is as passed to `pack_sequences`; None means one packed row. Does not read the padding of
    packed rows. Differentiable in `tensor`.
    """
    lengths = read_lengths(input_lengths)
    sizes = _checked_sizes([len(lengths)] if packed_sequence_size is None else packed_sequence_size, len(lengths))
    if not isinstance(tensor, Tensor) or tensor.ndim < 2 or len(tensor) != len(sizes):
        raise BatchTypeError(
            f"unpack_tensor takes a tensor [{len(sizes)}, L, ...] with one row for each entry of "
            f"packed_sequence_size (one row if that is None), got {describe(tensor)}"
        )
    remaining = iter(lengths)
    sequences: list[Tensor] = []
    for row, size in zip(tensor, sizes, strict=True):
        parts = list(islice(remaining, size))
        if sum(parts) > len(row):
            raise BatchError(
                f"unpack_tensor: the sequences of a packed row have {sum(parts)} tokens in total, but the tensor has "
                f"{len(row)} columns; pass the input_lengths that it was packed with"
            )
        sequences += row[: sum(parts)].split(parts) if parts else ()
    return _pad_rows(sequences, tensor.flatten(0, 1), 0, 0)


def group_and_cat_tensors(
    tensors: Sequence[Tensor], group_sizes: Sequence[int], padding_value: float = 0, min_seq_len: int = 0
) -> Tensor:
    """Concatenate the first `group_sizes[0]` tensors into row 0, the next `[1]` into row 1, and so on; return `[P, L]`.

    `tensors` are 1-D of any lengths, or `[n, ...]` with equal sizes from dimension 1 on, of one dtype and device. L is
    the longest row, but at least `min_seq_len`; rows are padded on the right with `padding_value`. Differentiable.
    """
    try:
        parts = list(tensors)
    except TypeError:
        raise BatchTypeError(f"group_and_cat_tensors takes a list of tensors, got {describe(tensors)}") from None
    odd = [part for part in parts if not isinstance(part, Tensor)]
    if odd:
        raise BatchTypeError(f"group_and_cat_tensors takes a list of tensors, got one that contains {describe(odd[0])}")
    if not parts or any(part.ndim == 0 for part in parts) or len({(p.shape[1:], p.dtype, p.device) for p in parts}) > 1:
        raise BatchError(
            "group_and_cat_tensors takes at least one tensor, all with dimension 0 as the sequence and equal in the "
            f"other dimensions, dtype and device; got {[f'{describe(part)} on {part.device}' for part in parts]}"
        )
    groups = _join_groups(parts, _checked_sizes(group_sizes, len(parts)), parts[0])
    return _pad_rows(groups, parts[0], padding_value, min_seq_len)


@dataclass
class FlashAttentionKwargs:
    """Bounds of the sequences in a packed row, in the form of flash attention's variable-length kernels.

    `cu_seqlens_q` and `cu_seqlens_k` are `[B + 1]` int32, two tensors with the same values; `max_seqlen_*` is the
    longest sequence. Tokens after the last bound belong to no sequence.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def get_flash_attention_kwargs(input_lengths: Tensor) -> FlashAttentionKwargs:
    """Return the bounds of consecutive sequences of `input_lengths [B]` tokens, on the device of the lengths."""
    lengths = read_lengths(input_lengths)
    if sum(lengths) > torch.iinfo(torch.int32).max:
        raise BatchError(
            f"{sum(lengths)} tokens in one packed row exceed the range of its bounds (int32); pack fewer rows"
        )
    bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=input_lengths.device)
    longest = max(lengths, default=0)
    return FlashAttentionKwargs(bounds, bounds.clone(), longest, longest)


def _join_groups(sequences: Iterable[Tensor], sizes: Iterable[int], like: Tensor) -> list[Tensor]:
    """Concatenate the first `sizes[0]` sequences, the next `sizes[1]`, and so on; a group may have none.

    `like [n, ...]` has the dtype, device and further dimensions of a sequence.
    """
    remaining = iter(sequences)
    return [torch.cat([like[:0], *islice(remaining, size)]) for size in sizes]


def _pad_rows(rows: Sequence[Tensor], like: Tensor, padding_value: float, least: int) -> Tensor:
    """Stack rows `[n, ...]`, padded on the right to the longest and at least to `least`; see `_join_groups`."""
    if not isinstance(padding_value, Real):
        raise BatchTypeError(f"padding_value must be a number, got {padding_value!r}")
    shortest = like.new_empty((read_count(least, "min_seq_len", 0), *like.shape[1:]))
    return pad_sequence([*rows, shortest], batch_first=True, padding_value=float(padding_value))[:-1]


def _lengths_of(input_ids: Tensor, input_lengths: Tensor) -> list[int]:
    """Return `input_lengths [B]` as a list; raise `BatchError` unless they fit `input_ids [B, S, ...]`."""
    if not isinstance(input_ids, Tensor):
        raise BatchTypeError(f"input_ids must be a tensor [B, S] or [B, S, ...], got {describe(input_ids)}")
    lengths = read_lengths(input_lengths, input_ids.shape[1] if input_ids.ndim > 1 else None)
    if input_ids.ndim < 2 or len(input_ids) != len(lengths):
        raise BatchError(
            f"input_ids has shape {list(input_ids.shape)}, input_lengths has [{len(lengths)}]; they must be [B, S] and "
            "[B]"
        )
    return lengths


def _checked_sizes(sizes: Sequence[int], sequences: int) -> list[int]:
    """Return `sizes` as a list; raise `BatchError` unless they assign all sequences to packed rows."""
    try:
        counts = [operator.index(size) for size in sizes]
    except TypeError:
        counts = [-1]
    if min(counts, default=0) < 0 or sum(counts) != sequences:
        raise BatchError(
            f"{sequences} sequences cannot be packed by sizes {sizes}: the numbers of sequences in each packed row "
            f"must be integers of at least 0 that add up to {sequences}"
        )
    return counts
