"""The rows of a global batch and their counts: by hand, and against sums."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from probe_rows import changed, rows_of

from rlframework.base.errors import BatchError, BatchKeyError, BatchTypeError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.interfaces.loss import LossType
from rlframework.policy.microbatches.global_batch import (
    check_sequence_dim,
    check_tokens,
    process_global_batch,
    read_mask,
    rows_with_targets,
)


def test_counts_by_hand():
    token_mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 1, 0], [1, 1, 1]])
    rows = rows_of([3, 3, 2, 3], token_mask=token_mask, sample_mask=torch.tensor([1.0, 1.0, 1.0, 0.0]))
    found = process_global_batch(rows, None, None, batch_idx=0, batch_size=2)
    assert found["batch"]["number"].tolist() == [0, 1]
    assert (found["global_valid_seqs"].item(), found["global_valid_toks"].item()) == (2, 3)
    found = process_global_batch(rows, None, None, batch_idx=1, batch_size=2)
    assert found["batch"]["number"].tolist() == [2, 3]
    assert (found["global_valid_seqs"].item(), found["global_valid_toks"].item()) == (1, 1)
    for name in ("global_valid_seqs", "global_valid_toks"):
        assert found[name].shape == ()
        assert found[name].dtype == torch.float32


def test_without_a_token_mask_every_target_counts():
    rows = rows_of([4, 1, 3], 6, sample_mask=torch.tensor([1.0, 1.0, 0.0]))
    rows["input_lengths"][1] = 0
    assert process_global_batch(rows, None, None, batch_idx=0, batch_size=3)["global_valid_toks"] == 3
    del rows["input_lengths"]
    assert process_global_batch(rows, None, None, batch_idx=0, batch_size=3)["global_valid_toks"] == 10


@settings(max_examples=80, deadline=None)
@given(
    rows=st.integers(1, 6),
    width=st.integers(0, 7),
    seed=st.integers(0, 99),
    dtype=st.sampled_from([torch.bool, torch.int64, torch.float32, torch.float64, torch.uint8]),
    sample_dtype=st.sampled_from([torch.bool, torch.int32, torch.float32, torch.bfloat16]),
)
def test_counts_are_plain_sums(rows, width, seed, dtype, sample_dtype):
    generator = torch.Generator().manual_seed(seed)
    token_mask = (torch.rand(rows, width, generator=generator) > 0.5).to(dtype)
    sample_mask = (torch.rand(rows, generator=generator) > 0.3).to(sample_dtype)
    data = BatchedDataDict(
        {"input_ids": torch.zeros(rows, width).long(), "token_mask": token_mask, "sample_mask": sample_mask}
    )
    found = process_global_batch(data, None, None, batch_idx=0, batch_size=rows)
    chosen = [row for row in range(rows) if sample_mask[row]]
    assert found["global_valid_seqs"].item() == len(chosen)
    expected = sum(bool(token_mask[row, column]) for row in chosen for column in range(1, width))
    assert found["global_valid_toks"].item() == expected


class NemoLossType(Enum):
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


@pytest.mark.parametrize("token_level", [LossType.TOKEN_LEVEL, NemoLossType.TOKEN_LEVEL])
def test_a_token_level_loss_needs_the_token_mask(token_level):
    rows = rows_of([2, 3], sample_mask=torch.ones(2))
    with pytest.raises(AssertionError, match="token_mask must be present in the data when using token-level loss"):
        process_global_batch(rows, SimpleNamespace(loss_type=token_level), None, batch_idx=0, batch_size=2)
    for loss in (SimpleNamespace(loss_type=NemoLossType.SEQUENCE_LEVEL), SimpleNamespace(), len):
        assert process_global_batch(rows, loss, None, batch_idx=0, batch_size=2)["global_valid_toks"] == 3


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int32, torch.int64])
def test_lengths_of_any_integers_count(dtype):
    rows = rows_of([4, 1, 3], 6, sample_mask=torch.ones(3))
    rows["input_lengths"] = torch.tensor([4, 0, 3], dtype=dtype)  # 0 - 1 is 255 in uint8
    assert process_global_batch(rows, None, None, batch_idx=0, batch_size=3)["global_valid_toks"] == 5


@pytest.mark.parametrize("lengths", [[2, 9], [-1, 3]])
def test_invalid_lengths_are_rejected(lengths):
    rows = changed(token_mask=None, input_lengths=torch.tensor(lengths))
    with pytest.raises(BatchError, match=r"of row . is (9|-1); allowed is 0\.\.3"):
        process_global_batch(rows, None, None, batch_idx=0, batch_size=2)


MASK = torch.ones(4, 6)
SAMPLES = torch.ones(4)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"token_mask": MASK[:, :1]},
            r"token_mask must have the shape \[4, 6\].* got torch.float32 of shape \[4, 1\]",
        ),
        ({"token_mask": MASK[:, :5]}, r"token_mask must have the shape \[4, 6\]"),
        ({"token_mask": MASK.repeat(1, 2)}, r"got torch.float32 of shape \[4, 12\]"),
        ({"token_mask": MASK.to(torch.complex64)}, r"token_mask must be a tensor \[B, S\] .* got torch.complex64"),
    ],
)
def test_invalid_masks_are_rejected(values, message):
    rows = BatchedDataDict({"input_ids": torch.ones(4, 6).long(), "token_mask": MASK, "sample_mask": SAMPLES, **values})
    with pytest.raises(BatchError, match=message):
        process_global_batch(rows, None, None, batch_idx=0, batch_size=4)


@pytest.mark.parametrize("positions", ["some", "", None, 1, []])
def test_unknown_positions_are_rejected(positions):
    rows = BatchedDataDict({"input_ids": torch.ones(4, 6).long(), "input_lengths": torch.full((4,), 6)})
    with pytest.raises(BatchError, match="use 'all', 'token_mask', 'loss', 'last' or 'loss_last'"):
        rows_with_targets(rows, positions)


def test_masks_are_checked_against_the_rows():
    """Also if the batch was not sliced, which would have raised the error."""
    ids = torch.ones(4, 6).long()
    for rows in ({"input_ids": ids, "sample_mask": SAMPLES[:3]}, {"words": [""] * 4, "sample_mask": SAMPLES[:3]}):
        with pytest.raises(BatchError, match=r"sample_mask must have the shape \[4\]"):
            read_mask(BatchedDataDict(rows), "sample_mask", 1)
    with pytest.raises(BatchError, match=r"token_mask must have the shape \[4, S\]"):
        read_mask(BatchedDataDict({"sample_mask": SAMPLES, "token_mask": MASK[:3]}), "token_mask", 2)
    assert read_mask(BatchedDataDict({"sample_mask": SAMPLES, "token_mask": MASK}), "token_mask", 2) is MASK
    assert read_mask(BatchedDataDict(input_ids=ids), "token_mask", 2) is None


def test_counts_without_tokens():
    rows = BatchedDataDict({"token_mask": MASK, "sample_mask": torch.tensor([1.0, 0, 1, 1])})
    assert process_global_batch(rows, None, None, batch_idx=0, batch_size=4)["global_valid_toks"] == 15


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.complex64])
def test_tokens_and_lengths_must_be_integers(dtype):
    with pytest.raises(BatchTypeError, match=rf"input_ids must be a tensor of integer token ids \[B, S\], got {dtype}"):
        check_tokens(changed(input_ids=torch.ones(2, 3).to(dtype)))
    with pytest.raises(BatchTypeError, match=f"input_lengths must be integers, got {dtype}"):
        check_tokens(changed(input_lengths=torch.ones(2).to(dtype)))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int32, torch.int64])
def test_tokens_and_lengths_of_any_integer_dtype(dtype):
    ids = torch.ones(2, 3, dtype=dtype)
    assert check_tokens(changed(input_ids=ids, input_lengths=torch.ones(2, dtype=dtype))) is ids


def test_the_sequence_dimension_by_hand():
    rows = changed(
        logits=torch.ones(2, 3, 8), words=["a", "b"], pixel_values=PackedTensor([torch.ones(7, 5), None], dim_to_pack=0)
    )
    assert check_sequence_dim(rows) == (1, 3)
    rows["other"] = torch.ones(2, 5)
    assert check_sequence_dim(rows, skip_keys=["other"]) == (1, 3)
    assert check_sequence_dim(rows, skip_keys={"other", "not there"}) == (1, 3)
    for skipped in (None, [], ["logits"]):
        with pytest.raises(BatchError, match=r"^Dim 1 must be the sequence dim, expected dim 1=3.*'other'.*\[2, 5\]"):
            check_sequence_dim(rows, skip_keys=skipped)
    with pytest.raises(BatchTypeError, match="skip_keys must be a list of keys, got 'other'"):
        check_sequence_dim(rows, skip_keys="other")
    with pytest.raises(BatchKeyError, match="input_ids must be present"):
        check_sequence_dim(changed(input_ids=None))
