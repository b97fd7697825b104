"""RewardData: what is checked, masks and lengths, and the ways to and from batches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework_preferences import reward_data
from rlframework_preferences.reward_data import RewardData

IDS = torch.tensor([[5, 6, 7, 0], [8, 9, 0, 0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]])


def same_place(first: Tensor, second: Tensor) -> bool:
    return first.data_ptr() == second.data_ptr() and first.shape == second.shape and first.stride() == second.stride()


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_lengths_come_from_the_mask(dtype: torch.dtype) -> None:
    data = RewardData(IDS, MASK.to(dtype), batch_size=[2])
    assert data.check() is data
    assert data.input_lengths.tolist() == [3, 2]
    assert data.input_lengths.dtype == torch.int64
    assert data[1].input_lengths.tolist() == 2
    assert torch.stack([data, data]).input_lengths.tolist() == [[3, 2], [3, 2]]


@pytest.mark.parametrize(
    ("rewards", "end_scores"),
    [((2,), None), ((2, 1), (2,)), ((2, 4), (2, 1)), ((2, 4, 1), None), (None, (2, 1))],
)
def test_shapes_of_rewards_that_are_allowed(rewards: Any, end_scores: Any) -> None:
    values = [None if shape is None else torch.zeros(shape) for shape in (rewards, end_scores)]
    data = RewardData(IDS, MASK, *values, batch_size=[2])
    assert data.check() is data
    row = data[0]
    assert row.check() is row
    fields = data.to_fields()
    assert {name: tuple(value.shape) for name, value in fields.items() if name in ("rewards", "end_scores")} == {
        **({} if rewards is None else {"rewards": (2, 4) if 4 in rewards else (2,)}),
        **({} if end_scores is None else {"end_scores": (2,)}),
    }


def test_a_width_of_one_keeps_rewards_of_tokens() -> None:
    data = RewardData(IDS[:, :1], MASK[:, :1], torch.zeros(2, 1), batch_size=[2])
    assert data.to_fields()["rewards"].shape == (2, 1)


@pytest.mark.parametrize(
    ("changes", "kind", "told"),
    [
        (
            {"input_ids": IDS.float()},
            BatchTypeError,
            r"input_ids is torch.float32 of shape \[2, 4\]; it must be integers",
        ),
        ({"input_ids": IDS.bool()}, BatchTypeError, "must be integers"),
        (
            {"input_ids": TensorDict({"x": IDS}, [2])},
            BatchTypeError,
            "input_ids is a TensorDict; it must be a tensor",
        ),
        ({"attention_mask": None}, BatchTypeError, "attention_mask is a NoneType"),
        ({"attention_mask": MASK[:, :3]}, BatchError, r"attention_mask has shape \[2, 3\] and input_ids \[2, 4\]"),
        (
            {"attention_mask": MASK.float()},
            BatchTypeError,
            "attention_mask is torch.float32; it must be bool or integers",
        ),
        ({"attention_mask": MASK * 2}, BatchError, "of row 0 is neither 0 nor 1 at position 0"),
        ({"attention_mask": -MASK}, BatchError, "of row 0 is neither 0 nor 1 at position 0"),
        ({"attention_mask": MASK.flip(1)}, BatchError, "of row 0 has padding before a token, at position 0"),
        (
            {"attention_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 0, 1]])},
            BatchError,
            "of row 1 has padding before .* 2;",
        ),
        (
            {"rewards": torch.zeros(2, 3)},
            BatchError,
            r"rewards is .* of shape \[2, 3\]; .* \[2\] or \[2, 1\] or \[2, 4\]",
        ),
        ({"rewards": torch.zeros(2, dtype=torch.complex64)}, BatchError, "must be real numbers"),
        ({"end_scores": torch.zeros(2, 4)}, BatchError, r"end_scores is .* of shape \[2, 4\]; .* \[2\] or \[2, 1\]"),
    ],
)
def test_what_is_wrong_is_told(changes: dict[str, Any], kind: type[Exception], told: str) -> None:
    fields = {"input_ids": IDS, "attention_mask": MASK, "batch_size": [2], **changes}
    data = RewardData(**fields)  # constructing permits it
    for use in (data.check, data.to_fields, lambda: data.input_lengths):
        with pytest.raises(kind, match=told):
            use()


def test_a_byte_of_a_bool_mask_that_is_no_bool_is_found() -> None:
    broken = torch.tensor([[1, 1, 7, 0]], dtype=torch.uint8).view(torch.bool)
    with pytest.raises(BatchError, match="of row 0 is neither 0 nor 1 at position 2"):
        RewardData(IDS[:1], broken, batch_size=[1]).check()


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (0, 0), (0,), (5,)])
def test_empty_shapes(shape: tuple[int, ...]) -> None:
    data = RewardData(torch.zeros(shape, dtype=torch.int64), torch.ones(shape, dtype=torch.bool), batch_size=shape[:-1])
    assert data.check() is data
    assert data.input_lengths.tolist() == torch.full(shape[:-1], shape[-1]).tolist()


def test_meta_tensors_are_checked_by_shape() -> None:
    data = RewardData(IDS.to("meta"), MASK.to("meta"), batch_size=[2])
    assert data.check().input_lengths.shape == (2,)
    with pytest.raises(BatchError, match="rewards"):
        RewardData(IDS.to("meta"), MASK.to("meta"), torch.zeros(2, 9, device="meta"), batch_size=[2]).check()


def test_a_large_mask_is_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reward_data, "_CHUNK", 10)
    lengths = torch.tensor([4, 0, 3, 1, 2, 4, 4])
    data = RewardData.from_lengths(torch.zeros(7, 4, dtype=torch.int64), lengths)
    assert data.input_lengths.tolist() == lengths.tolist()
    data.attention_mask[5, 1] = False
    with pytest.raises(BatchError, match="of row 5 has padding before a token, at position 1"):
        data.check()


@pytest.mark.slow
@given(st.lists(st.integers(0, 9), max_size=12), st.integers(0, 5), st.booleans())
@settings(deadline=None, max_examples=60)
def test_lengths_and_back(lengths: list[int], more: int, ints: bool) -> None:
    width = max(lengths, default=0) + more
    data = RewardData.from_lengths(
        torch.zeros(len(lengths), width, dtype=torch.int32), torch.tensor(lengths, dtype=torch.int64)
    )
    expected = [[position < length for position in range(width)] for length in lengths]
    assert data.attention_mask.tolist() == expected
    if ints:
        data.attention_mask = data.attention_mask.int()
    assert data.input_lengths.tolist() == lengths


@pytest.mark.slow
@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=4))
@settings(deadline=None, max_examples=100)
def test_masks_that_are_not_right_padding_are_refused(rows: list[list[bool]]) -> None:
    data = RewardData(torch.zeros(len(rows), 5, dtype=torch.int64), torch.tensor(rows), batch_size=[len(rows)])
    if all(row == sorted(row, reverse=True) for row in rows):
        assert data.input_lengths.tolist() == [sum(row) for row in rows]
    else:
        with pytest.raises(BatchError, match="padding before a token"):
            data.input_lengths  # noqa: B018


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        (torch.tensor([1, 5]), "input_lengths are from 1 to 5"),
        (torch.tensor([-1, 2]), "input_lengths are from -1 to 2"),
        (torch.tensor([1, 2, 3]), r"input_lengths is torch.int64 of shape \[3\]"),
        (torch.tensor([1.0, 2.0]), "input_lengths is torch.float32"),
        ([1, 2], "input_lengths is a list"),
    ],
)
def test_lengths_that_do_not_fit(lengths: Any, told: str) -> None:
    with pytest.raises(BatchError, match=told):
        RewardData.from_lengths(IDS, lengths)


def test_from_lengths_checks_the_rest_too() -> None:
    with pytest.raises(BatchError, match="end_scores"):
        RewardData.from_lengths(IDS, torch.tensor([3, 2]), end_scores=torch.zeros(3))


def test_to_and_from_a_batch_share_storage() -> None:
    data = RewardData(IDS, MASK.bool(), torch.zeros(2, 4, 1), torch.zeros(2, 1), batch_size=[2])
    batch: BatchedDataDict[Any] = BatchedDataDict(data.to_fields())
    assert batch.size == 2
    assert batch["input_lengths"].tolist() == [3, 2]
    assert same_place(batch["input_ids"], data.input_ids)
    assert same_place(batch["attention_mask"], data.attention_mask)
    assert batch["rewards"].data_ptr() == data.rewards.data_ptr()
    assert batch["end_scores"].data_ptr() == data.end_scores.data_ptr()


def test_mapped_data_shares_its_file_with_the_batch(tmp_path: Any) -> None:
    mapped = RewardData(IDS, MASK, batch_size=[2]).save(tmp_path / "a")
    batch: BatchedDataDict[Any] = BatchedDataDict(mapped.to_fields())
    assert type(batch["input_ids"]) is Tensor
    batch["input_ids"][0, 0] = 99
    assert RewardData.load(tmp_path / "a").input_ids[0, 0] == 99


def test_a_single_row_is_no_batch() -> None:
    row = RewardData(IDS, MASK, batch_size=[2])[0]
    with pytest.raises(BatchError, match=r"input_ids has shape \[4\]; it must be \[B, S\]"):
        row.to_fields()
    assert row.unsqueeze(0).to_fields()["input_ids"].tolist() == [[5, 6, 7, 0]]
