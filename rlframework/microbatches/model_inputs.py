"""Rows of tokens as the input of a model's forward: padded, or packed into one or several rows.

`padded_inputs` and `packed_inputs` serve the default data processor; the other functions have NeMo-RL's names and
arguments. All of them do index arithmetic on whole tensors, on the tensors' device. Does not cover grouping rows or
choosing the positions of the head, which `data_processor` does.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlframework.batch.batch_rows import describe, is_integral
from rlframework.batch.packing.lengths import read_count, round_up
from rlframework.errors import BatchError, BatchTypeError
from rlframework.interfaces.data_processor import ProcessedInputs


def padded_inputs(input_ids: Tensor, pad_multiple: int = 1) -> ProcessedInputs:
    """Pad the rows `[b, S]`, of any integer dtype, with zeros on the right to a multiple of `pad_multiple`, as int64.

    Needs no mask: under causal attention no token sees the padding on its right.
    """
    input_ids = input_ids.to(torch.int64)
    rows, width = input_ids.shape
    length = round_up(width, pad_multiple)
    return ProcessedInputs(
        input_ids=pad(input_ids, (0, length - width)) if length > width else input_ids,
        seq_len=length,
        position_ids=torch.arange(length, device=input_ids.device).expand(rows, length),
    )


def packed_inputs(input_ids: Tensor, lengths: Tensor, pad_multiple: int = 1) -> tuple[ProcessedInputs, Tensor]:
    """Concatenate the tokens of the rows `[b, S]` into one row `[1, L]`; return it and the bounds of the sequences.

    L is the sum of `lengths [b]`, rounded up to a multiple of `pad_multiple`; the padding is one more sequence, of
    zeros. Positions restart at 0 with each sequence. The bounds are int32 `[b + 1]`, or `[b + 2]` with padding. Tokens
    and lengths may have any integer dtype; the model gets int64.
    """
    input_ids, lengths = input_ids.to(torch.int64), lengths.to(torch.int64)
    tokens = input_ids.masked_select(_prefix_mask(lengths, input_ids.shape[1]))
    starts = pad(lengths.cumsum(0), (1, 0))
    total = len(tokens)
    tail = round_up(total, pad_multiple) - total
    inputs = ProcessedInputs(
        input_ids=pad(tokens, (0, tail))[None],
        seq_len=total + tail,
        position_ids=pad(_positions(lengths, total), (0, tail))[None],
    )
    bounds = torch.cat((starts, starts[-1:] + tail)) if tail else starts
    return inputs, bounds.to(torch.int32)


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
    known, least = _checked_lengths(input_lengths, input_ids, "input_ids"), _checked_padding(padding_value, min_seq_len)
    lengths, totals = known.to(input_ids.device), _totals(known, packed_sequence_size)
    real = _prefix_mask(totals.to(input_ids.device), max([least, *totals.tolist()]))
    packed = _fill(real, _take(input_ids, _prefix_mask(lengths, input_ids.shape[1])), padding_value)
    positions = _fill(real, _positions(lengths, int(totals.sum())), 0)
    return packed, positions, _block_diagonal_mask(lengths, real) if return_attention_mask else None


def unpack_tensor(tensor: Tensor, input_lengths: Tensor, packed_sequence_size: Sequence[int] | None = None) -> Tensor:
    """Unpack packed rows `[P, L, ...]` into rows `[B, max(input_lengths), ...]`, padded with zeros on the right.

    `packed_sequence_size` is as passed to `pack_sequences`; None means one packed row. Does not read the padding of
    packed rows. Differentiable in `tensor`.
    """
    known = _checked_lengths(input_lengths)
    totals = _totals(known, [len(known)] if packed_sequence_size is None else packed_sequence_size)
    if not isinstance(tensor, Tensor) or tensor.ndim < 2 or len(tensor) != len(totals):
        raise BatchTypeError(
            f"unpack_tensor takes a tensor [{len(totals)}, L, ...] with one row for each entry of "
            f"packed_sequence_size (one row if that is None), got {describe(tensor)}"
        )
    most = max(totals.tolist(), default=0)
    if most > tensor.shape[1]:
        raise BatchError(
            f"unpack_tensor: the sequences of a packed row have {most} tokens in total, but the tensor has "
            f"{tensor.shape[1]} columns; pass the input_lengths that it was packed with"
        )
    tokens = _take(tensor, _prefix_mask(totals.to(tensor.device), tensor.shape[1]))
    return _fill(_prefix_mask(known.to(tensor.device), max(known.tolist(), default=0)), tokens, 0)


def group_and_cat_tensors(
    tensors: Sequence[Tensor], group_sizes: Sequence[int], padding_value: float = 0, min_seq_len: int = 0
) -> Tensor:
    """Concatenate the first `group_sizes[0]` tensors into row 0, the next `[1]` into row 1, and so on; return `[P, L]`.

    `tensors` are 1-D of any lengths, or `[n, ...]` with equal sizes from dimension 1 on, of one dtype and device. L is
    the longest row, but at least `min_seq_len`; rows are padded on the right with `padding_value`. Differentiable.
    """
    parts, least = _checked_tensors(tensors), _checked_padding(padding_value, min_seq_len)
    totals = _totals(torch.tensor([len(part) for part in parts]), group_sizes)
    real = _prefix_mask(totals.to(parts[0].device), max([least, *totals.tolist()]))
    return _fill(real, torch.cat(parts), padding_value)


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
    lengths = _checked_lengths(input_lengths)
    if int(lengths.sum()) > torch.iinfo(torch.int32).max:
        raise BatchError(
            f"{int(lengths.sum())} tokens in one packed row exceed the range of its bounds (int32); pack fewer rows"
        )
    bounds = pad(lengths.cumsum(0), (1, 0)).to(torch.int32).to(input_lengths.device)
    longest = max(lengths.tolist(), default=0)
    return FlashAttentionKwargs(bounds, bounds.clone(), longest, longest)


def _prefix_mask(counts: Tensor, width: int) -> Tensor:
    """Return `[R, width]` bool: True in the first `counts[r]` columns of row r."""
    return torch.arange(width, device=counts.device) < counts[:, None]


def _take(values: Tensor, real: Tensor) -> Tensor:
    """Return the `values [R, C, ...]` where `real [R, C]`, in row-major order: `[T, ...]`."""
    return values.masked_select(real) if values.ndim == 2 else values[real]


def _fill(real: Tensor, values: Tensor, padding_value: float) -> Tensor:
    """The inverse of `_take`: put `values [T, ...]` where `real [R, C]`, and `padding_value` elsewhere.

    Packing keeps the order of the tokens, so it is one `_take` and one `_fill` with another mask.
    """
    filled = values.new_full((*real.shape, *values.shape[1:]), padding_value)
    if values.ndim == 1:
        return filled.masked_scatter(real, values)
    return filled.flatten(0, 1).index_copy(0, real.flatten().nonzero()[:, 0], values).view_as(filled)


def _positions(lengths: Tensor, total: int) -> Tensor:
    """Return `[total]`: the position of each token in its own sequence."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(total, device=lengths.device) - starts.repeat_interleave(lengths, output_size=total)


def _block_diagonal_mask(lengths: Tensor, real: Tensor) -> Tensor:
    """Return the mask `[P, L, L]` of `pack_sequences` for packed rows with tokens where `real [P, L]`."""
    sequence = _fill(real, torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths), -1)
    query, key = sequence.unsqueeze(2), sequence.unsqueeze(1)
    return ((query == key) & (query >= 0)).tril_()


def _checked_lengths(input_lengths: Tensor, rows: Tensor | None = None, name: str = "") -> Tensor:
    """Return `input_lengths` as int64 on the CPU; raise `BatchError` unless they are `[B]` and fit the rows."""
    if not is_integral(input_lengths) or input_lengths.ndim != 1:
        raise BatchTypeError(f"input_lengths must be a 1-D tensor of integers, got {describe(input_lengths)}")
    if name and not isinstance(rows, Tensor):
        raise BatchTypeError(f"{name} must be a tensor [B, S] or [B, S, ...], got {describe(rows)}")
    if rows is not None and (rows.ndim < 2 or len(rows) != len(input_lengths)):
        raise BatchError(
            f"{name} has shape {list(rows.shape)}, input_lengths has {list(input_lengths.shape)}; they must be [B, S] "
            "and [B]"
        )
    lengths = input_lengths.to("cpu", torch.int64)
    most = None if rows is None else rows.shape[1]
    if len(lengths) and (int(lengths.min()) < 0 or (most is not None and int(lengths.max()) > most)):
        allowed = "0 or more" if most is None else f"0..{most}, the columns of {name}"
        raise BatchError(f"input_lengths are in {int(lengths.min())}..{int(lengths.max())}; allowed is {allowed}")
    return lengths


def _checked_padding(padding_value: Any, min_seq_len: Any) -> int:
    """Return `min_seq_len` as an int; raise `BatchError` unless it is a count and `padding_value` a number."""
    if not isinstance(padding_value, Real):
        raise BatchTypeError(f"padding_value must be a number, got {padding_value!r}")
    return read_count(min_seq_len, "min_seq_len", 0)


def _checked_tensors(tensors: Any) -> list[Tensor]:
    """Return a non-empty list of tensors; raise `BatchError` unless dtype, device and sizes from dimension 1 agree."""
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
    return parts


def _totals(lengths: Tensor, sizes: Sequence[int]) -> Tensor:
    """Return `[P]`: the tokens in each packed row; raise `BatchError` unless `sizes` assign all sequences to rows."""
    try:
        counts = [operator.index(size) for size in sizes]
    except TypeError:
        counts = [-1]
    if min(counts, default=0) < 0 or sum(counts) != len(lengths):
        raise BatchError(
            f"{len(lengths)} sequences cannot be packed by sizes {sizes}: the numbers of sequences in each packed row "
            f"must be integers of at least 0 that add up to {len(lengths)}"
        )
    ends = pad(lengths.cumsum(0), (1, 0))
    return ends[pad(torch.tensor(counts, dtype=torch.int64).cumsum(0), (1, 0))].diff()
