"""Microbatches: grouping, packing, and where head values belong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.data.microbatches import MicrobatchProcessor, check_sequence_dim, group_rows, make_microbatch
from rlframework.distributed.batched_data_dict import BatchedDataDict
from rlframework.errors import BatchError
from rlframework.interfaces.data_processor import BatchPlan, MicrobatchRule

CPU = torch.device("cpu")


def batch_of(lengths: list[int], width: int | None = None, **masks: Any) -> BatchedDataDict[Any]:
    """Row r holds the tokens 100 r + 1, 100 r + 2, ...; padding is 0."""
    width = width or max(lengths)
    columns = torch.arange(width)
    real = columns < torch.tensor(lengths)[:, None]
    ids = (torch.arange(len(lengths))[:, None] * 100 + columns + 1) * real
    data = {"input_ids": ids, "input_lengths": torch.tensor(lengths), "name": [f"row {r}" for r in range(len(lengths))]}
    return BatchedDataDict({**data, **{key: torch.tensor(value) for key, value in masks.items()}})


def test_padded_groups_are_consecutive():
    assert group_rows([3, 1, 2, 5, 4], BatchPlan("padded", 2, 0)) == [[0, 1], [2, 3], [4]]


def test_dynamic_groups_are_of_like_length_and_under_the_limit():
    assert group_rows([3, 1, 2, 5, 4], BatchPlan("dynamic", 2, 8)) == [[3], [4, 0], [2, 1]]


def test_packed_groups_fill_bins_first_fit_decreasing():
    assert group_rows([3, 1, 2, 5, 4], BatchPlan("packed", 2, 8)) == [[3, 0], [4, 2, 1]]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=30),
    mode=st.sampled_from(["padded", "dynamic", "packed"]),
    tokens=st.integers(40, 90),
)
def test_every_row_stands_in_one_group_under_the_limit(lengths, mode, tokens):
    groups = group_rows(lengths, BatchPlan(mode, 4, tokens))
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [lengths[row] for row in group]
        assert (
            len(group) <= 4
            if mode == "padded"
            else (sum(sizes) if mode == "packed" else max(sizes) * len(sizes)) <= tokens
        )


def test_a_row_over_the_limit_is_an_error_that_says_what_to_do():
    with pytest.raises(BatchError, match=r"90 tokens.*may have 64.*policy\.batching\.tokens"):
        group_rows([3, 90], BatchPlan("packed", 1, 64))


def test_a_padded_microbatch_by_hand():
    data = batch_of([3, 2], width=6)
    made = make_microbatch(data, torch.tensor([1, 0]), packed=False, positions="all")
    assert made.input_ids.tolist() == [[101, 102, 0], [1, 2, 3]]
    assert made.position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert made.targets.tolist() == [102, 2, 3]
    assert made.head_positions.tolist() == [0, 3, 4]
    assert made.scatter.tolist() == [1, 4, 5]
    assert made.data["name"] == ["row 1", "row 0"]
    assert made.cu_seqlens is None


def test_a_packed_microbatch_by_hand():
    data = batch_of([3, 2, 4], width=6)
    made = make_microbatch(data, torch.tensor([0, 1]), packed=True, positions="all", pad_multiple=4)
    assert made.input_ids.tolist() == [[1, 2, 3, 101, 102, 0, 0, 0]]
    assert made.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert made.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert made.targets.tolist() == [2, 3, 102]
    assert made.head_positions.tolist() == [0, 1, 3]
    assert made.scatter.tolist() == [1, 2, 4]


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    packed=st.booleans(),
    multiple=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 100),
)
def test_the_head_sees_the_token_before_each_target(lengths, packed, multiple, seed):
    generator = torch.Generator().manual_seed(seed)
    data = batch_of(lengths, width=14)
    data["token_mask"] = torch.randint(0, 2, (len(lengths), 14), generator=generator).float()
    rows = torch.randperm(len(lengths), generator=generator)
    made = make_microbatch(data, rows, packed=packed, positions="token_mask", pad_multiple=multiple)
    flat = made.input_ids.reshape(-1)
    assert torch.equal(flat[made.head_positions] + 1, made.targets)  # tokens count up within a row
    dense = torch.zeros_like(made.data["input_ids"]).reshape(-1)
    dense[made.scatter] = made.targets
    mask = made.data["token_mask"].bool()
    mask[:, 0] = False
    assert torch.equal(dense.view_as(mask), made.data["input_ids"] * mask * (made.data["input_ids"] > 0))
    assert made.input_ids.shape[1] % multiple == 0


def test_rows_without_work_are_left_out_of_the_loss_only():
    data = batch_of([3, 3, 3], token_mask=[[0.0, 1, 1], [1.0, 0, 0], [0.0, 0, 1]], sample_mask=[0.0, 1, 1])
    plan, processor = BatchPlan("padded", 8, 0), MicrobatchProcessor()

    def rows(positions: str) -> list[int]:
        made = processor.microbatches(data, plan, MicrobatchRule(), positions=positions, device=CPU)
        return [row for microbatch in made for row in microbatch.rows.tolist()]

    assert rows("loss") == [2]
    assert rows("token_mask") == [0, 2]
    assert rows("all") == [0, 1, 2]
    with pytest.raises(BatchError, match="'some'; take 'all', 'token_mask' or 'loss'"):
        rows("some")


def test_a_tensor_of_another_width_is_an_error_that_names_it():
    data = batch_of([3, 2], width=6)
    data["advantages"] = torch.zeros(2, 5)
    with pytest.raises(BatchError, match=r"'advantages' has shape \(2, 5\).*6 columns"):
        check_sequence_dim(data)
