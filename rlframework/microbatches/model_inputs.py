"""Rows of tokens as a model's forward takes them: padded, or packed into one row or several.

`padded_inputs` and `packed_inputs` serve the default data processor; the others have NeMo-RL's names and arguments. All
of it is index arithmetic on whole tensors, on the device that they are on. Left out: what decides which rows go
together (`microbatches`), and where the head runs.
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

from rlframework.batch.batch_rows import described, is_integral
from rlframework.batch.packing.lengths import read_count, round_up
from rlframework.errors import BatchError, BatchTypeError
from rlframework.interfaces.data_processor import ProcessedInputs


def padded_inputs(input_ids: Tensor, pad_multiple: int = 1) -> ProcessedInputs:
    """The rows `[b, S]` of any integers as int64, with zeros on the right up to a multiple of `pad_multiple`.

    No mask: under causal attention no token sees the padding on its right.
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
    """The tokens of the rows `[b, S]` one after the other in one row `[1, L]`, and the bounds of the sequences.

    L is the sum of `lengths [b]`, rounded up to a multiple of `pad_multiple`; the tail is one more sequence, of zeros.
    Positions start again at 0 with each sequence. The bounds `[b + 1]` or, with a tail, `[b + 2]` are int32. Tokens and
    lengths may be any integers; the model gets int64.
    """
    input_ids, lengths = input_ids.to(torch.int64), lengths.to(torch.int64)
    tokens = input_ids.masked_select(_first(lengths, input_ids.shape[1]))
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
    """Put the first `packed_sequence_size[0]` rows one after the other into packed row 0, the next into row 1, ...

    `input_ids [B, S]` of any dtype (or `[B, S, ...]`), of which `input_lengths [B]` tokens a row are real. With P
    packed rows and L the longest of them, at least `min_seq_len`, the results are

    - the tokens `[P, L]`, with `padding_value` on the right;
    - positions `[P, L]` int64, which start again at 0 with each sequence and are 0 in the padding;
    - the attention mask `[P, L, L]` bool, or None: True where the query (dimension 1) sees the key. It is
      block-diagonal and causal: a token sees those of its own sequence up to itself. Padding sees nothing and nobody
      sees it. (In NeMo-RL the mask is causal over the whole row, so that a sequence sees those packed before it.)

    `unpack_tensor` is the inverse. A gradient flows through to `input_ids`. `BatchError` where sizes do not fit.
    """
    known, least = _checked_lengths(input_lengths, input_ids, "input_ids"), _checked_filling(padding_value, min_seq_len)
    lengths, totals = known.to(input_ids.device), _totals(known, packed_sequence_size)
    real = _first(totals.to(input_ids.device), max([least, *totals.tolist()]))
    packed = _fill(real, _take(input_ids, _first(lengths, input_ids.shape[1])), padding_value)
    positions = _fill(real, _positions(lengths, int(totals.sum())), 0)
    return packed, positions, _block_diagonal_mask(lengths, real) if return_attention_mask else None


def unpack_tensor(tensor: Tensor, input_lengths: Tensor, packed_sequence_size: Sequence[int] | None = None) -> Tensor:
    """The sequences of packed rows `[P, L, ...]` as rows `[B, max(input_lengths), ...]`, with zeros on the right.

    `packed_sequence_size`: as given to `pack_sequences`; None: there is one packed row. The padding of packed rows is
    not read. A gradient flows through to `tensor`.
    """
    known = _checked_lengths(input_lengths)
    totals = _totals(known, [len(known)] if packed_sequence_size is None else packed_sequence_size)
    if not isinstance(tensor, Tensor) or tensor.ndim < 2 or len(tensor) != len(totals):
        raise BatchTypeError(
            f"unpack_tensor: what is unpacked must be a tensor [{len(totals)}, L, ...], a row for each entry of "
            f"packed_sequence_size (one row if that is None), got {described(tensor)}"
        )
    most = max(totals.tolist(), default=0)
    if most > tensor.shape[1]:
        raise BatchError(
            f"unpack_tensor: the sequences of a packed row have {most} tokens together, but the tensor has "
            f"{tensor.shape[1]} columns; give it the input_lengths that it was packed with"
        )
    tokens = _take(tensor, _first(totals.to(tensor.device), tensor.shape[1]))
    return _fill(_first(known.to(tensor.device), max(known.tolist(), default=0)), tokens, 0)


def group_and_cat_tensors(
    tensors: Sequence[Tensor], group_sizes: Sequence[int], padding_value: float = 0, min_seq_len: int = 0
) -> Tensor:
    """The first `group_sizes[0]` tensors one after the other in row 0, the next in row 1, ...; `[P, L]`.

    `tensors`: 1-D of any lengths (or `[n, ...]`, alike from dimension 1 on), of one dtype and device. L is the longest
    row, at least `min_seq_len`; `padding_value` fills up on the right. A gradient flows through.
    """
    parts, least = _checked_tensors(tensors), _checked_filling(padding_value, min_seq_len)
    totals = _totals(torch.tensor([len(part) for part in parts]), group_sizes)
    real = _first(totals.to(parts[0].device), max([least, *totals.tolist()]))
    return _fill(real, torch.cat(parts), padding_value)


@dataclass
class FlashAttentionKwargs:
    """Bounds of the sequences in a packed row, as flash attention's kernels for variable lengths take them.

    `cu_seqlens_q`, `cu_seqlens_k` `[B + 1]` int32, two tensors with the same numbers; `max_seqlen_*`: the longest
    sequence. What follows the last bound belongs to no sequence.
    """

    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    max_seqlen_q: int
    max_seqlen_k: int


def get_flash_attention_kwargs(input_lengths: Tensor) -> FlashAttentionKwargs:
    """The bounds of sequences of `input_lengths [B]` tokens that follow each other, on the device of the lengths."""
    lengths = _checked_lengths(input_lengths)
    if int(lengths.sum()) > torch.iinfo(torch.int32).max:
        raise BatchError(f"{int(lengths.sum())} tokens in one packed row are more than its bounds (int32) can count")
    bounds = pad(lengths.cumsum(0), (1, 0)).to(torch.int32).to(input_lengths.device)
    longest = max(lengths.tolist(), default=0)
    return FlashAttentionKwargs(bounds, bounds.clone(), longest, longest)


def _first(counts: Tensor, width: int) -> Tensor:
    """`[R, width]` bool: the first `counts[r]` columns of each row."""
    return torch.arange(width, device=counts.device) < counts[:, None]


def _take(values: Tensor, real: Tensor) -> Tensor:
    """The `values [R, C, ...]` where `real [R, C]`, in the order of rows and columns: `[T, ...]`."""
    return values.masked_select(real) if values.ndim == 2 else values[real]


def _fill(real: Tensor, values: Tensor, padding_value: float) -> Tensor:
    """The inverse: `values [T, ...]` where `real [R, C]`, and `padding_value` elsewhere.

    Packing moves tokens and keeps their order, so it is one `_take` and one `_fill`.
    """
    filled = values.new_full((*real.shape, *values.shape[1:]), padding_value)
    if values.ndim == 1:
        return filled.masked_scatter(real, values)
    return filled.flatten(0, 1).index_copy(0, real.flatten().nonzero()[:, 0], values).view_as(filled)


def _positions(lengths: Tensor, total: int) -> Tensor:
    """`[total]`: the position of each token in its own sequence."""
    starts = lengths.cumsum(0) - lengths
    return torch.arange(total, device=lengths.device) - starts.repeat_interleave(lengths, output_size=total)


def _block_diagonal_mask(lengths: Tensor, real: Tensor) -> Tensor:
    """`[P, L, L]` bool for packed rows whose tokens are where `real [P, L]`: see `pack_sequences`."""
    sequence = _fill(real, torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths), -1)
    query, key = sequence.unsqueeze(2), sequence.unsqueeze(1)
    return ((query == key) & (query >= 0)).tril_()


def _checked_lengths(input_lengths: Tensor, rows: Tensor | None = None, name: str = "") -> Tensor:
    """`input_lengths` as int64 on the CPU; a `BatchError` unless they are `[B]` and fit the rows `[B, S, ...]`."""
    if not is_integral(input_lengths) or input_lengths.ndim != 1:
        raise BatchTypeError(f"input_lengths must be a 1-D tensor of integers, got {described(input_lengths)}")
    if name and not isinstance(rows, Tensor):
        raise BatchTypeError(f"{name} must be a tensor [B, S] or [B, S, ...], got {described(rows)}")
    if rows is not None and (rows.ndim < 2 or len(rows) != len(input_lengths)):
        raise BatchError(
            f"{name} has shape {list(rows.shape)}, input_lengths has {list(input_lengths.shape)}; they must be [B, S] "
            "and [B]"
        )
    lengths = input_lengths.to("cpu", torch.int64)
    most = None if rows is None else rows.shape[1]
    if len(lengths) and (int(lengths.min()) < 0 or (most is not None and int(lengths.max()) > most)):
        allowed = "0 or more" if most is None else f"0..{most}, the columns of {name}"
        raise BatchError(f"input_lengths lie in {int(lengths.min())}..{int(lengths.max())}; allowed is {allowed}")
    return lengths


def _checked_filling(padding_value: Any, min_seq_len: Any) -> int:
    """`min_seq_len` as an int; a `BatchError` unless it is a count and `padding_value` a number."""
    if not isinstance(padding_value, Real):
        raise BatchTypeError(f"padding_value must be a number, got {padding_value!r}")
    return read_count(min_seq_len, "min_seq_len", 0)


def _checked_tensors(tensors: Any) -> list[Tensor]:
    """At least one tensor, alike from dimension 1 on, in dtype and device; else a `BatchError`."""
    try:
        parts = list(tensors)
    except TypeError:
        raise BatchTypeError(f"group_and_cat_tensors takes a list of tensors, got {described(tensors)}") from None
    odd = [part for part in parts if not isinstance(part, Tensor)]
    if odd:
        raise BatchTypeError(f"group_and_cat_tensors takes a list of tensors, got one with {described(odd[0])}")
    if not parts or any(part.ndim == 0 for part in parts) or len({(p.shape[1:], p.dtype, p.device) for p in parts}) > 1:
        raise BatchError(
            "group_and_cat_tensors takes at least one tensor, all with dimension 0 as the sequence and alike in the "
            f"other dimensions, dtype and device; got {[f'{described(part)} on {part.device}' for part in parts]}"
        )
    return parts


def _totals(lengths: Tensor, sizes: Sequence[int]) -> Tensor:
    """`[P]`: tokens in each packed row, into which `sizes` put the sequences; a `BatchError` unless all are put."""
    try:
        counts = [operator.index(size) for size in sizes]
    except TypeError:
        counts = [-1]
    if min(counts, default=0) < 0 or sum(counts) != len(lengths):
        raise BatchError(
            f"{len(lengths)} sequences cannot be packed by sizes {sizes}: how many go into each packed row must be "
            f"integers of 0 or more that add up to {len(lengths)}"
        )
    ends = pad(lengths.cumsum(0), (1, 0))
    return ends[pad(torch.tensor(counts, dtype=torch.int64).cumsum(0), (1, 0))].diff()
