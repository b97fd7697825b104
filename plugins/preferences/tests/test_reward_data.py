"""RewardData as a tensorclass."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from tensordict import is_tensorclass

from rlframework_preferences.reward_data import RewardData

IDS = [[5, 6, 7, 0], [8, 9, 0, 0], [3, 0, 0, 0]]
MASK = [[1, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
SCORES = [0.5, -1.0, 2.0]


def make(**changes: object) -> RewardData:
    fields = {
        "input_ids": torch.tensor(IDS),
        "attention_mask": torch.tensor(MASK, dtype=torch.bool),
        "end_scores": torch.tensor(SCORES),
        "batch_size": [3],
        **changes,
    }
    return RewardData(**fields)


def assert_same(data: RewardData) -> None:
    """`data` is what `make()` makes."""
    assert type(data) is RewardData
    assert data.batch_size == torch.Size([3])
    assert data.input_ids.tolist() == IDS
    assert data.input_ids.dtype == torch.int64
    assert data.attention_mask.int().tolist() == MASK
    assert data.attention_mask.dtype == torch.bool
    assert data.end_scores is not None
    assert data.end_scores.tolist() == SCORES
    assert data.rewards is None


def test_construction() -> None:
    data = make()
    assert is_tensorclass(data)
    assert_same(data)
    assert data.device is None
    assert data.names == [None]
    assert make(names=["rows"]).names == ["rows"]
    assert RewardData(torch.tensor(IDS), torch.tensor(MASK)).batch_size == torch.Size([])
    assert make(device="cpu").device == torch.device("cpu")
    assert make(device="meta").input_ids.is_meta
    assert len(data) == 3


def test_get_and_set() -> None:
    data = make()
    assert data.get("input_ids") is data.input_ids
    assert data.get("rewards") is None
    assert data.get("nothing", 17) == 17
    assert data.get(("input_ids", "deeper"), "none") == "none"
    assert data.set("rewards", torch.ones(3)) is data
    assert data.get("rewards").tolist() == [1.0, 1.0, 1.0]
    kept = data.rewards
    data.set("rewards", torch.full((3,), 2.0), inplace=True)
    assert data.rewards is kept
    assert kept.tolist() == [2.0, 2.0, 2.0]
    data.rewards = torch.zeros(3, 4)
    assert data.rewards.shape == (3, 4)
    with pytest.raises(AttributeError, match="no such field"):
        data.set("reward", torch.ones(3))
    with pytest.raises(RuntimeError, match="batch dimension mismatch"):
        data.set("rewards", torch.ones(2))


def test_unbind_and_indexing_share_storage() -> None:
    data = make()
    rows = data.unbind(0)
    assert len(rows) == 3
    for index, row in enumerate(rows):
        assert type(row) is RewardData
        assert row.batch_size == torch.Size([])
        assert row.input_ids.tolist() == IDS[index]
        assert row.input_ids.data_ptr() == data.input_ids[index].data_ptr()
    rows[1].input_ids[0] = 77
    assert data.input_ids[1, 0] == 77
    part = data[1:]
    assert part.batch_size == torch.Size([2])
    assert part.input_ids.data_ptr() == data.input_ids[1].data_ptr()
    picked = data[torch.tensor([2, 0])]
    assert picked.end_scores is not None
    assert picked.end_scores.tolist() == [2.0, 0.5]
    data[0] = picked[0]
    assert data.input_ids[0].tolist() == IDS[2]


def test_stack_cat_clone_and_to() -> None:
    data = make()
    stacked = torch.stack([data, data])
    assert type(stacked) is RewardData
    assert stacked.batch_size == torch.Size([2, 3])
    joined = torch.cat([data, data[:1]])
    assert type(joined) is RewardData
    assert joined.input_ids.tolist() == [*IDS, IDS[0]]
    for copied in (data.clone(), copy.deepcopy(data)):
        assert_same(copied)
        assert copied.input_ids.data_ptr() != data.input_ids.data_ptr()
    moved = data.to("meta")
    assert type(moved) is RewardData
    assert moved.device == torch.device("meta")
    assert_same(data)
    assert data.to(torch.float64).end_scores.dtype == torch.float64


def test_pickling_and_state_dict() -> None:
    assert_same(pickle.loads(pickle.dumps(make())))  # noqa: S301
    other = make(input_ids=torch.zeros(3, 4, dtype=torch.int64), end_scores=torch.zeros(3))
    other.load_state_dict(make().state_dict())
    assert_same(other)
