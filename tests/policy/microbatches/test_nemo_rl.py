"""NeMo-RL's functions for one microbatch and for iterators over them: by hand, and against loops."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_rows import DYNAMIC, EOS, FIXED, PACKED, TOKENIZER, rows_of

from rlframework.base.errors import BatchError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.nemo_rl.microbatches import (
    get_microbatch_iterator,
    make_processed_microbatch_iterator,
    process_microbatch,
)

# -- one microbatch ---------------------------------------------------------------------------------------------------


def test_padded_by_hand():
    rows = rows_of([2, 3], 4)
    inputs = process_microbatch(rows, TOKENIZER, False, FIXED, cp_size=1)
    assert inputs.input_ids is rows["input_ids"]
    assert inputs.seq_len == 4
    assert inputs.attention_mask.tolist() == [[True] * 4] * 2
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3]] * 2
    assert [inputs.has_flash_attention, inputs.has_context_parallel, inputs.is_multimodal] == [False] * 3
    assert (inputs.flash_attn_kwargs, inputs.cp_buffers, inputs.seq_index) == ({}, [], None)


def test_packed_by_hand():
    inputs = process_microbatch(rows_of([2, 3], 4), TOKENIZER, True, PACKED, cp_size=1)
    assert inputs.input_ids.tolist() == [[1, 2, 11, 12, 13]]  # not padded to 500
    assert inputs.position_ids.tolist() == [[0, 1, 0, 1, 2]]
    assert inputs.seq_len == 5
    assert inputs.attention_mask is None
    assert inputs.has_flash_attention
    bounds = inputs.flash_attn_kwargs
    assert bounds.cu_seqlens_q.tolist() == bounds.cu_seqlens_k.tolist() == [0, 2, 5]
    assert (bounds.max_seqlen_q, bounds.max_seqlen_k) == (3, 3)


@pytest.mark.parametrize("packing", [False, True])
def test_context_parallelism_by_hand(packing):
    rows = rows_of([2, 3])
    before = rows["input_ids"].clone()
    inputs = process_microbatch(rows, TOKENIZER, packing, PACKED if packing else FIXED, cp_size=2)
    expected = [[1, 2, 11, 12, 13, EOS, EOS, EOS]] if packing else [[1, 2, 0, EOS], [11, 12, 13, EOS]]
    positions = [[0, 1, 0, 1, 2, 0, 0, 0]] if packing else [[0, 1, 2, 3]] * 2
    assert inputs.input_ids.tolist() == expected  # a multiple of 2 * 2 columns
    assert inputs.position_ids.tolist() == positions
    assert inputs.seq_len == len(expected[0])
    assert inputs.seq_index.tolist() == [list(range(inputs.seq_len))]
    assert inputs.has_context_parallel
    assert inputs.attention_mask is None
    for buffer, tensor in zip(
        inputs.cp_buffers, (inputs.input_ids, inputs.position_ids, inputs.seq_index), strict=True
    ):
        assert buffer is tensor
        buffer.fill_(-5)  # as torch shards them in place
    assert torch.equal(rows["input_ids"], before)


def test_context_parallelism_does_not_shard_the_batch_itself():
    rows = rows_of([4, 4])
    inputs = process_microbatch(rows, TOKENIZER, False, FIXED, cp_size=2)
    inputs.cp_buffers[0].fill_(-5)
    assert rows["input_ids"].tolist() == [[1, 2, 3, 4], [11, 12, 13, 14]]


@pytest.mark.parametrize("packing", [False, True])
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize(("ids", "lengths"), [(torch.int32, torch.int32), (torch.uint8, torch.uint8)])
def test_the_model_gets_int64_from_any_integers(ids, lengths, packing, cp_size):
    rows = rows_of([2, 3], 4)
    expected = process_microbatch(rows, TOKENIZER, packing, PACKED, cp_size)
    rows["input_ids"], rows["input_lengths"] = rows["input_ids"].to(ids), rows["input_lengths"].to(lengths)
    inputs = process_microbatch(rows, TOKENIZER, packing, PACKED, cp_size)
    for name in ("input_ids", "position_ids"):
        assert getattr(inputs, name).dtype == torch.int64
        assert torch.equal(getattr(inputs, name), getattr(expected, name))
    if packing:
        assert inputs.flash_attn_kwargs.cu_seqlens_q.tolist() == [0, 2, 5]
    assert rows["input_ids"].dtype == ids  # the rows are unchanged


@pytest.mark.parametrize(("eos", "pad", "filling"), [(3, 4, 3), (None, 4, 4), (None, None, 0), (0, 4, 0)])
def test_padding_token(eos, pad, filling):
    tokenizer = SimpleNamespace(eos_token_id=eos, pad_token_id=pad)
    inputs = process_microbatch(rows_of([3]), tokenizer, False, FIXED, cp_size=2)
    assert inputs.input_ids.tolist() == [[1, 2, 3, filling]]


def test_media_go_to_the_model_which_computes_positions():
    pixels = [torch.ones(2, 3), None]
    types = torch.tensor([[0, 1, 1], [0, 0, 0]])
    rows = rows_of([3, 2], pixel_values=PackedTensor(pixels, dim_to_pack=0), mm_token_type_ids=types)
    inputs = process_microbatch(rows, TOKENIZER, False, FIXED, cp_size=1)
    assert inputs.is_multimodal
    assert sorted(inputs.vlm_kwargs) == ["mm_token_type_ids", "pixel_values"]
    assert torch.equal(inputs.vlm_kwargs["pixel_values"], torch.ones(2, 3))
    assert inputs.position_ids is None
    text = process_microbatch(rows.slice(1, 2), TOKENIZER, False, FIXED, cp_size=1)
    assert sorted(text.vlm_kwargs) == ["mm_token_type_ids"]  # this row has no image


@pytest.mark.parametrize(
    ("packing", "cfg", "cp_size", "message"),
    [
        (True, PACKED, 1, "sequence packing"),
        (False, FIXED, 2, "context parallelism"),
        (False, {**FIXED, "dtensor_cfg": {"sequence_parallel": True}}, 1, "sequence parallelism"),
        (True, PACKED, 2, "sequence packing and context parallelism"),
    ],
)
def test_media_are_rejected_with_unsupported_options(packing, cfg, cp_size, message):
    rows = rows_of([3, 2], pixel_values=PackedTensor([torch.ones(2, 3), None], dim_to_pack=0))
    expected = rf"multimodal rows \(pixel_values\) are not supported with {message}; disable it"
    with pytest.raises(BatchError, match=expected):
        process_microbatch(rows, TOKENIZER, packing, cfg, cp_size)
    text = rows_of([3, 2])
    process_microbatch(text, TOKENIZER, packing, cfg, cp_size)


# -- iterators --------------------------------------------------------------------------------------------------------


def test_the_iterator_is_lazy_and_keeps_the_rows():
    made = []

    def raw():
        for lengths in ([2, 3], [4]):
            made.append(rows_of(lengths))
            yield made[-1]

    iterator = make_processed_microbatch_iterator(raw(), TOKENIZER, {}, cp_size=1)
    assert made == []
    first = next(iterator)
    assert len(made) == 1
    assert first.data_dict is made[0]
    assert (first.original_batch_size, first.original_seq_len) == (2, 3)
    packed = list(make_processed_microbatch_iterator(raw(), TOKENIZER, PACKED, cp_size=1))
    assert [part.processed_inputs.seq_len for part in packed] == [5, 4]
    assert [part.original_batch_size for part in packed] == [2, 1]


def numbers(iterator: Any) -> list[list[int]]:
    return [part.data_dict["number"].tolist() for part in iterator]


def shard(data: BatchedDataDict[Any], mode: str, shards: int, tokens: int) -> list[BatchedDataDict[Any]]:
    common = {"max_tokens_per_microbatch": tokens, "input_key": "input_ids", "input_lengths_key": "input_lengths"}
    if mode == "dynamic":
        return data.shard_by_batch_size(shards, dynamic_batching_args={**common, "sequence_length_round": 1})[0]
    packing = {**common, "algorithm": "modified_first_fit_decreasing", "sequence_length_pad_multiple": 1}
    return data.shard_by_batch_size(shards, sequence_packing_args=packing)[0]


def test_fixed_microbatches():
    iterator, count = get_microbatch_iterator(rows_of([1, 2, 3, 4]), FIXED, 2, None, TOKENIZER)
    assert count == 2
    assert numbers(iterator) == [[0, 1], [2, 3]]


def test_dynamic_microbatches_are_as_wide_as_their_longest_row():
    (only,) = shard(rows_of([3, 9, 5, 16]), "dynamic", 1, 16)
    iterator, count = get_microbatch_iterator(only, DYNAMIC, 99, None, TOKENIZER)
    found = list(iterator)
    assert count == len(found) == 3  # 3 and 5; 9; 16
    assert [part.processed_inputs.seq_len for part in found] == [5, 9, 16]
    assert numbers(found) == [[0, 2], [1], [3]]


def test_packed_microbatches_are_the_planned_bins():
    (only,) = shard(rows_of([3, 9, 5, 16]), "packed", 1, 17)
    iterator, count = get_microbatch_iterator(only, PACKED, 99, None, TOKENIZER)
    found = list(iterator)
    assert count == len(found) == 2
    assert sorted(map(sorted, numbers(found))) == [[0, 1, 2], [3]]
    assert sorted(part.processed_inputs.seq_len for part in found) == [16, 17]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=4, max_size=16).filter(lambda rows: len(rows) % 2 == 0),
    mode=st.sampled_from(["dynamic", "packed"]),
    tokens=st.integers(12, 40),
)
def test_every_row_is_in_one_microbatch_and_every_token_reaches_the_model(lengths, mode, tokens):
    shards = 2 if mode == "dynamic" else 1
    seen: list[int] = []
    for part in shard(rows_of(lengths, 14), mode, shards, tokens):
        iterator, count = get_microbatch_iterator(part, DYNAMIC if mode == "dynamic" else PACKED, 1, None, TOKENIZER)
        found = list(iterator)
        assert len(found) == count
        for one in found:
            rows, inputs = one.data_dict, one.processed_inputs
            seen += rows["number"].tolist()
            each = zip(rows["input_ids"], rows["input_lengths"].tolist(), strict=True)
            if mode == "packed":
                assert inputs.input_ids[0].tolist() == [token for row, n in each for token in row[:n].tolist()]
                assert inputs.seq_len <= tokens
            else:
                assert inputs.input_ids.numel() <= tokens
                assert all(row[:n].all() for row, n in each)
    assert sorted(seen) == list(range(len(lengths)))
