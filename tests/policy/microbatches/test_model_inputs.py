"""Packing and unpacking rows, against loops over single tokens and by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch.batch_rows import round_up
from rlframework.policy.microbatches.model_inputs import (
    get_flash_attention_kwargs,
    group_and_cat_tensors,
    pack_sequences,
    packed_inputs,
    padded_inputs,
    unpack_tensor,
)

IDS = torch.tensor([[1, 2, 0, 0], [3, 4, 5, 0], [6, 7, 8, 9]])
LENGTHS = torch.tensor([2, 3, 4])


def test_two_packed_rows_by_hand():
    ids, positions, mask = pack_sequences(IDS, LENGTHS, [2, 1], padding_value=-1)
    assert ids.tolist() == [[1, 2, 3, 4, 5], [6, 7, 8, 9, -1]]
    assert positions.tolist() == [[0, 1, 0, 1, 2], [0, 1, 2, 3, 0]]
    assert positions.dtype == torch.int64
    assert mask.dtype == torch.bool
    assert mask.int().tolist() == [
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 1, 1, 1]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]],
    ]


def test_no_mask_and_a_minimum_length():
    ids, positions, mask = pack_sequences(IDS, LENGTHS, [3], return_attention_mask=False, min_seq_len=11)
    assert ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0]]
    assert positions.tolist() == [[0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 0]]
    assert mask is None


def test_rows_and_packed_rows_may_be_empty():
    ids, positions, mask = pack_sequences(IDS, torch.tensor([0, 2, 0]), [1, 0, 2], padding_value=7)
    assert ids.tolist() == [[7, 7], [7, 7], [3, 4]]
    assert positions.tolist() == [[0, 0], [0, 0], [0, 1]]
    assert mask.sum() == 3
    nothing, _, mask = pack_sequences(IDS[:0], LENGTHS[:0], [], min_seq_len=3)
    assert nothing.shape == (0, 3)
    assert mask.shape == (0, 3, 3)
    assert pack_sequences(IDS[:0], LENGTHS[:0], [0])[0].shape == (1, 0)
    assert unpack_tensor(torch.zeros(1, 4, 2), LENGTHS[:0]).shape == (0, 0, 2)


def test_unpack_by_hand_and_padding_is_not_read():
    packed = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 7.0, 8.0, 9.0, torch.nan]])
    expected = [[1, 2, 0, 0], [3, 4, 5, 0], [6, 7, 8, 9]]
    assert unpack_tensor(packed, LENGTHS, [2, 1]).tolist() == expected
    assert unpack_tensor(packed[:1], LENGTHS[:2]).tolist() == [[1, 2, 0], [3, 4, 5]]


def test_group_and_cat_by_hand():
    tensors = [torch.tensor(row) for row in ([1, 2], [3], [4, 5, 6], [])]
    tensors[-1] = tensors[-1].long()
    assert group_and_cat_tensors(tensors, [2, 2], padding_value=9).tolist() == [[1, 2, 3], [4, 5, 6]]
    assert group_and_cat_tensors(tensors, [1, 3], padding_value=9, min_seq_len=5).tolist() == [
        [1, 2, 9, 9, 9],
        [3, 4, 5, 6, 9],
    ]
    pairs = group_and_cat_tensors([torch.ones(1, 2), torch.zeros(2, 2)], [1, 1])
    assert pairs.tolist() == [[[1, 1], [0, 0]], [[0, 0], [0, 0]]]


def test_flash_attention_bounds_by_hand():
    found = get_flash_attention_kwargs(torch.tensor([2, 0, 5]))
    assert found.cu_seqlens_q.tolist() == found.cu_seqlens_k.tolist() == [0, 2, 2, 7]
    assert found.cu_seqlens_q.dtype == found.cu_seqlens_k.dtype == torch.int32
    assert found.cu_seqlens_q.data_ptr() != found.cu_seqlens_k.data_ptr()
    assert (found.max_seqlen_q, found.max_seqlen_k) == (5, 5)
    assert type(found.max_seqlen_q) is int
    assert bool(found)  # NeMo-RL tests its truth value
    empty = get_flash_attention_kwargs(torch.zeros(0, dtype=torch.int64))
    assert (empty.cu_seqlens_q.tolist(), empty.max_seqlen_k) == ([0], 0)


DTYPES = [torch.int64, torch.int32, torch.uint8, torch.float32, torch.float64, torch.bfloat16, torch.bool]


@st.composite
def packings(draw):
    """`input_ids [B, S]` or `[B, S, 2]`, lengths, and the numbers of rows in each packed row."""
    lengths = draw(st.lists(st.integers(0, 9), max_size=8))
    width = max(lengths, default=0) + draw(st.integers(0, 3))
    sizes, left = [], len(lengths)
    while left:
        sizes.append(draw(st.integers(0, left)))
        left -= sizes[-1]
    dtype = draw(st.sampled_from(DTYPES))
    shape = (len(lengths), width, 2) if draw(st.booleans()) else (len(lengths), width)
    ids = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(draw(st.integers(0, 99)))).to(dtype)
    length_dtype = draw(st.sampled_from([torch.int64, torch.int32, torch.uint8]))
    return ids, torch.tensor(lengths, dtype=length_dtype), sizes, draw(st.integers(0, 20))


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(packings())
def test_packing_equals_a_loop_over_tokens(case):
    ids, lengths, sizes, least = case
    packed, positions, mask = pack_sequences(ids, lengths, sizes, padding_value=1, min_seq_len=least)
    rows = iter(zip(ids, lengths.tolist(), strict=True))
    groups = [[next(rows) for _ in range(size)] for size in sizes]
    width = max([least, *(sum(length for _, length in group) for group in groups)])
    assert packed.shape == (len(sizes), width, *ids.shape[2:])
    assert packed.dtype == ids.dtype
    for p, group in enumerate(groups):
        tokens = [(row[i], i, s) for s, (row, length) in enumerate(group) for i in range(length)]
        for q in range(width):
            token, position, sequence = tokens[q] if q < len(tokens) else (torch.ones_like(packed[p, q]), 0, None)
            assert torch.equal(packed[p, q], token)
            assert positions[p, q] == position
            seen = [k for k in range(min(q + 1, len(tokens))) if tokens[k][2] == sequence]
            assert mask[p, q].nonzero()[:, 0].tolist() == seen


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(packings())
def test_unpacking_is_the_inverse(case):
    ids, lengths, sizes, least = case
    packed, _, _ = pack_sequences(ids, lengths, sizes, padding_value=1, return_attention_mask=False, min_seq_len=least)
    longest = max(lengths.tolist(), default=0)
    real = torch.arange(longest) < lengths[:, None]
    expected = torch.where(real[..., None] if ids.ndim == 3 else real, ids[:, :longest], torch.zeros_like(ids[:1, :1]))
    got = unpack_tensor(packed, lengths, sizes)
    assert got.dtype == ids.dtype
    assert torch.equal(got, expected if len(ids) else ids[:, :0])


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(packings())
def test_grouping_tensors_is_packing_rows(case):
    ids, lengths, sizes, least = case
    if len(ids):
        parts = [row[:length] for row, length in zip(ids, lengths.tolist(), strict=True)]
        expected, _, _ = pack_sequences(ids, lengths, sizes, padding_value=1, min_seq_len=least)
        assert torch.equal(group_and_cat_tensors(parts, sizes, padding_value=1, min_seq_len=least), expected)


def test_gradients_flow_through_packing_and_back():
    values = torch.randn(3, 4, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 4, 2, dtype=torch.float64)
    packed, _, _ = pack_sequences(values, LENGTHS, [2, 1])
    (unpack_tensor(packed, LENGTHS, [2, 1]) * weights).sum().backward()
    real = torch.arange(4) < LENGTHS[:, None]
    assert torch.equal(values.grad, weights * real[..., None])
    parts = [torch.randn(n, dtype=torch.float64, requires_grad=True) for n in (2, 3)]
    (group_and_cat_tensors(parts, [1, 1]) * torch.tensor([[1.0, 2, 3], [4, 5, 6]])).sum().backward()
    assert [part.grad.tolist() for part in parts] == [[1, 2], [4, 5, 6]]


def test_sequences_in_a_packed_row_do_not_see_each_other():
    """Attention with the mask of `pack_sequences` gives each sequence its result alone; padding changes nothing."""
    hidden = torch.randn(3, 4, 8, requires_grad=True)
    packed, _, mask = pack_sequences(hidden, LENGTHS, [2, 1])
    query = packed[:, None]
    mixed = torch.nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=mask[:, None])[:, 0]
    got = unpack_tensor(mixed, LENGTHS, [2, 1])
    for row, length in enumerate(LENGTHS.tolist()):
        alone = hidden[row : row + 1, None, :length]
        wanted = torch.nn.functional.scaled_dot_product_attention(alone, alone, alone, is_causal=True)
        torch.testing.assert_close(got[row, :length], wanted[0, 0], rtol=1e-5, atol=1e-5)
    got.sum().backward()
    assert hidden.grad.isfinite().all()


def test_padded_and_packed_inputs_by_hand():
    padded = padded_inputs(IDS, pad_multiple=3)
    assert padded.input_ids.tolist() == [[1, 2, 0, 0, 0, 0], [3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 0, 0]]
    assert padded.position_ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    assert padded_inputs(IDS).input_ids is IDS
    packed, bounds = packed_inputs(IDS, LENGTHS, pad_multiple=4)
    assert packed.input_ids.tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0, 0]]
    assert packed.position_ids.tolist() == [[0, 1, 0, 1, 2, 0, 1, 2, 3, 0, 0, 0]]
    assert bounds.tolist() == [0, 2, 5, 9, 12]
    assert packed_inputs(IDS, LENGTHS)[1].tolist() == [0, 2, 5, 9]
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]


@pytest.mark.parametrize("ids", [torch.int64, torch.int32, torch.uint8])
@pytest.mark.parametrize("lengths", [torch.int64, torch.int32, torch.uint8])
def test_the_model_gets_int64_from_any_integers(ids, lengths):
    long_row = torch.arange(250).to(ids)[None].repeat(2, 1)
    counts = torch.tensor([250, 9], dtype=lengths)  # their sum exceeds uint8
    for inputs in (padded_inputs(long_row, 4), packed_inputs(long_row, counts, 4)[0], padded_inputs(long_row)):
        assert inputs.input_ids.dtype == inputs.position_ids.dtype == torch.int64
    packed, bounds = packed_inputs(long_row, counts, 4)
    assert packed.input_ids.tolist() == [[*range(250), *range(9), 0]]
    assert packed.position_ids.tolist() == [[*range(250), *range(9), 0]]
    assert bounds.tolist() == [0, 250, 259, 260]
    assert get_flash_attention_kwargs(counts).cu_seqlens_k.tolist() == [0, 250, 259]
    joined, positions, _ = pack_sequences(long_row, counts, [2], return_attention_mask=False)
    assert joined.tolist() == positions.tolist() == [[*range(250), *range(9)]]
    assert joined.dtype == ids
    assert unpack_tensor(joined, counts).shape == (2, 250)


WRONG_TYPES = {
    "lengths as a list": (lambda: pack_sequences(IDS, [2, 3, 4], [3]), "1-D tensor of integers, got a list"),
    "complex lengths": (lambda: pack_sequences(IDS, LENGTHS * 1j, [3]), "1-D tensor of integers, got torch.complex64"),
    "ids as a list": (
        lambda: pack_sequences(IDS.tolist(), LENGTHS, [3]),
        r"input_ids must be .*\[B, S\].*, got a list",
    ),
    "no ids": (lambda: pack_sequences(None, LENGTHS, [3]), "got a NoneType"),
    "least as text": (lambda: pack_sequences(IDS, LENGTHS, [3], min_seq_len="8"), "min_seq_len .* integer, got '8'"),
    "no padding value": (lambda: pack_sequences(IDS, LENGTHS, [3], None), "padding_value must be a number, got None"),
    "unpack a list": (lambda: unpack_tensor([[1, 2]], LENGTHS), r"takes a tensor \[1, L, ...\].* got a list"),
    "unpack by a list": (lambda: unpack_tensor(torch.zeros(1, 9), [2, 3, 4]), "1-D tensor of integers, got a list"),
    "cat lists": (lambda: group_and_cat_tensors([[1, 2], [3]], [2]), "list of tensors, got .*a list"),
    "cat None": (lambda: group_and_cat_tensors(None, [2]), "list of tensors, got a NoneType"),
    "cat least": (lambda: group_and_cat_tensors([LENGTHS], [1], min_seq_len="8"), "min_seq_len .* integer, got '8'"),
    "cat padding": (lambda: group_and_cat_tensors([LENGTHS], [1], padding_value="x"), "must be a number, got 'x'"),
    "flash list": (lambda: get_flash_attention_kwargs([1, 2]), "1-D tensor of integers, got a list"),
}


@pytest.mark.parametrize("case", WRONG_TYPES)
def test_wrong_types_are_rejected(case):
    call, message = WRONG_TYPES[case]
    with pytest.raises(BatchTypeError, match=message):
        call()


WRONG = {
    "float lengths": (lambda: pack_sequences(IDS, LENGTHS.float(), [3]), "1-D tensor of integers, got torch.float32"),
    "bool lengths": (lambda: pack_sequences(IDS, LENGTHS > 2, [3]), "1-D tensor of integers, got torch.bool"),
    "a length": (lambda: unpack_tensor(torch.zeros(1, 9), torch.tensor(3)), r"got torch.int64 of shape \[\]"),
    "2-D lengths": (lambda: pack_sequences(IDS, LENGTHS[None], [3]), r"of shape \[1, 3\]"),
    "more lengths than rows": (
        lambda: pack_sequences(IDS[:2], LENGTHS, [3]),
        r"shape \[2, 4\], input_lengths has \[3\]",
    ),
    "1-D ids": (lambda: pack_sequences(IDS[0], LENGTHS[:1], [1]), r"must be \[B, S\] and \[B\]"),
    "too long": (
        lambda: pack_sequences(IDS, LENGTHS + 1, [3]),
        r"of row 2 is 5; allowed is 0\.\.4, the columns of input_ids",
    ),
    "negative length": (lambda: pack_sequences(IDS, LENGTHS - 3, [3]), "of row 0 is -1"),
    "sizes too few": (lambda: pack_sequences(IDS, LENGTHS, [2]), r"3 sequences .* sizes \[2\].* add up to 3"),
    "sizes too many": (lambda: pack_sequences(IDS, LENGTHS, [2, 2]), "add up to 3"),
    "sizes negative": (lambda: pack_sequences(IDS, LENGTHS, [4, -1]), "integers of at least 0"),
    "sizes of floats": (lambda: pack_sequences(IDS, LENGTHS, [1.5, 1.5]), "integers of at least 0"),
    "sizes as a number": (lambda: pack_sequences(IDS, LENGTHS, 3), "integers of at least 0"),
    "unpack sizes as a number": (lambda: unpack_tensor(torch.zeros(1, 9), LENGTHS, 3), "integers of at least 0"),
    "least below 0": (lambda: pack_sequences(IDS, LENGTHS, [3], min_seq_len=-1), "min_seq_len must be at least 0"),
    "sizes of strings": (lambda: pack_sequences(IDS, LENGTHS, ["3"]), "integers of at least 0"),
    "unpack 1-D": (lambda: unpack_tensor(torch.zeros(9), LENGTHS), r"takes a tensor \[1, L, ...\]"),
    "unpack two rows by one": (lambda: unpack_tensor(torch.zeros(2, 9), LENGTHS), r"takes a tensor \[1, L, ...\]"),
    "unpack too short": (lambda: unpack_tensor(torch.zeros(1, 8), LENGTHS), "have 9 tokens in total.* 8 columns"),
    "unpack too short for one of two": (lambda: unpack_tensor(torch.zeros(2, 4), LENGTHS, [2, 1]), "have 5 tokens"),
    "cat nothing": (lambda: group_and_cat_tensors([], []), "at least one tensor"),
    "cat a number": (lambda: group_and_cat_tensors([torch.tensor(1)], [1]), "dimension 0 as the sequence"),
    "cat two dtypes": (lambda: group_and_cat_tensors([torch.zeros(1), torch.zeros(1).long()], [2]), "torch.int64"),
    "cat two shapes": (lambda: group_and_cat_tensors([torch.zeros(1, 2), torch.zeros(1, 3)], [2]), "other dimensions"),
    "cat sizes": (lambda: group_and_cat_tensors([torch.zeros(1)], [2]), "1 sequences cannot be packed"),
    "flash negative": (lambda: get_flash_attention_kwargs(-LENGTHS), "row 0 is -2; allowed is 0 or more"),
    "flash float": (lambda: get_flash_attention_kwargs(LENGTHS.float()), "1-D tensor of integers"),
    "flash too many": (lambda: get_flash_attention_kwargs(torch.tensor([2**31])), "2147483648 tokens"),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_sizes_are_rejected(case):
    call, message = WRONG[case]
    with pytest.raises(BatchError, match=message):
        call()
