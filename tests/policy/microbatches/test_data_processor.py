"""Microbatches: grouping, packing, and the positions of head outputs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.base.errors import BatchError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.data_processor import BatchPlan, MicrobatchRule
from rlframework.policy.microbatches.data_processor import (
    MicrobatchProcessor,
    make_dummy,
    make_microbatch,
    rows_by_microbatch,
)
from rlframework.policy.microbatches.global_batch import rows_to_plan
from rlframework.policy.microbatches.shapes import Padding

CPU = torch.device("cpu")


def batch_of(lengths: list[int], width: int | None = None, **masks: Any) -> BatchedDataDict[Any]:
    """Row r holds the tokens 100 r + 1, 100 r + 2, ...; padding is 0."""
    width = width or max(lengths)
    columns = torch.arange(width)
    real = columns < torch.tensor(lengths)[:, None]
    ids = (torch.arange(len(lengths))[:, None] * 100 + columns + 1) * real
    data = {"input_ids": ids, "input_lengths": torch.tensor(lengths), "name": [f"row {r}" for r in range(len(lengths))]}
    return BatchedDataDict({**data, **{key: torch.tensor(value) for key, value in masks.items()}})


def group_rows(lengths: list[int], plan: BatchPlan, pad_multiple: int = 1) -> list[list[int]]:
    """The rows of each microbatch, of rows with these lengths."""
    data, rule = batch_of(lengths, width=max([1, *lengths])), MicrobatchRule(pad_multiple=pad_multiple)
    batching = MicrobatchProcessor().batching(plan.mode)
    return [
        rows.tolist() for rows in rows_by_microbatch(rows_to_plan(data, "last", groups=False), batching, plan, rule)
    ]


def test_padded_groups_are_consecutive():
    assert group_rows([3, 1, 2, 5, 4], BatchPlan("padded", 2, 0)) == [[0, 1], [2, 3], [4]]


def test_dynamic_groups_have_similar_lengths_within_the_limit():
    """5 | 4 3 | 2 1 is the only way to make three of rows in the order of their lengths with at most 8 tokens each."""
    assert sorted(map(sorted, group_rows([3, 1, 2, 5, 4], BatchPlan("dynamic", 2, 8)))) == [[0, 4], [1, 2], [3]]


def test_packed_groups_fill_as_few_bins_as_possible():
    """15 tokens need at least two bins of 8, and 5 and 4 do not fit into one."""
    first, second = group_rows([3, 1, 2, 5, 4], BatchPlan("packed", 2, 8))
    assert sorted(first + second) == [0, 1, 2, 3, 4]
    assert (3 in first) != (4 in first)


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 40), max_size=30),
    mode=st.sampled_from(["padded", "dynamic", "packed"]),
    tokens=st.integers(40, 90),
)
def test_every_row_is_in_one_group_within_the_limit(lengths, mode, tokens):
    groups = group_rows(lengths, BatchPlan(mode, 4, tokens))
    assert sorted(row for group in groups for row in group) == list(range(len(lengths)))
    for group in groups:
        sizes = [lengths[row] for row in group]
        assert (
            len(group) <= 4
            if mode == "padded"
            else (sum(sizes) if mode == "packed" else max(sizes) * len(sizes)) <= tokens
        )


def test_a_row_over_the_limit_is_an_error_with_a_remedy():
    with pytest.raises(BatchError, match=r"90 tokens.*may have 64.*policy\.batching\.tokens"):
        group_rows([3, 90], BatchPlan("packed", 1, 64))


def test_a_padded_microbatch_by_hand():
    data = batch_of([3, 2], width=6)
    made = make_microbatch(data, torch.tensor([1, 0]), packed=False, positions="all")
    assert made.processed_inputs.input_ids.tolist() == [[101, 102, 0], [1, 2, 3]]
    assert made.processed_inputs.position_ids.tolist() == [[0, 1, 2], [0, 1, 2]]
    assert made.targets.tolist() == [102, 2, 3]
    assert made.head_positions.tolist() == [0, 3, 4]
    assert made.scatter.tolist() == [1, 4, 5]
    assert made.data_dict["name"] == ["row 1", "row 0"]
    assert made.cu_seqlens is None


def test_a_packed_microbatch_by_hand():
    data = batch_of([3, 2, 4], width=6)
    made = make_microbatch(data, torch.tensor([0, 1]), packed=True, positions="all", padding=Padding(4))
    assert made.processed_inputs.input_ids.tolist() == [[1, 2, 3, 101, 102, 0, 0, 0]]
    assert made.processed_inputs.position_ids.tolist() == [[0, 1, 2, 0, 1, 0, 0, 0]]
    assert made.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert made.targets.tolist() == [2, 3, 102]
    assert made.head_positions.tolist() == [0, 1, 3]
    assert made.scatter.tolist() == [1, 2, 4]


@pytest.mark.slow
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
    made = make_microbatch(data, rows, packed=packed, positions="token_mask", padding=Padding(multiple))
    flat = made.processed_inputs.input_ids.reshape(-1)
    assert torch.equal(flat[made.head_positions] + 1, made.targets)  # tokens count up within a row
    dense = torch.zeros_like(made.data_dict["input_ids"]).reshape(-1)
    dense[made.scatter] = made.targets
    mask = made.data_dict["token_mask"].bool()
    mask[:, 0] = False
    assert torch.equal(dense.view_as(mask), made.data_dict["input_ids"] * mask * (made.data_dict["input_ids"] > 0))
    assert made.processed_inputs.input_ids.shape[1] % multiple == 0


def test_masked_rows_are_left_out_of_the_loss_only():
    data = batch_of([3, 3, 3], token_mask=[[0.0, 1, 1], [1.0, 0, 0], [0.0, 0, 1]], sample_mask=[0.0, 1, 1])
    plan, processor = BatchPlan("padded", 8, 0), MicrobatchProcessor()

    def rows(positions: str) -> list[int]:
        made = processor.microbatches(data, plan, MicrobatchRule(), positions=positions, device=CPU)
        return [row for microbatch in made for row in microbatch.rows.tolist()]

    assert rows("loss") == [2]
    assert rows("token_mask") == [0, 2]
    assert rows("all") == [0, 1, 2]
    with pytest.raises(BatchError, match="'some'; use 'all', 'token_mask', 'loss', 'last' or 'loss_last'"):
        rows("some")


def planned(mode: str, **masks: Any) -> tuple[BatchedDataDict[Any], BatchPlan]:
    """Five rows that the driver has planned into microbatches of 2, 1 and 2 rows."""
    data = batch_of([3, 2, 4, 2, 3], **masks)
    data.micro_batch_indices, data.micro_batch_lengths = [[[0, 2], [2, 3], [3, 5]]], [[5, 4, 5]]
    return data, BatchPlan(mode, 8, 5)


@pytest.mark.parametrize("mode", ["packed", "dynamic"])
def test_microbatches_that_the_driver_planned_are_kept(mode):
    data, plan = planned(mode)
    made = MicrobatchProcessor().microbatches(data, plan, MicrobatchRule(), positions="all", device=CPU)
    assert [each.rows.tolist() for each in made] == [[0, 1], [2], [3, 4]]


def test_padded_microbatches_need_no_plan():
    data, plan = planned("padded")
    made = MicrobatchProcessor().microbatches(data, plan, MicrobatchRule(), positions="all", device=CPU)
    assert [each.rows.tolist() for each in made] == [[0, 1, 2, 3, 4]]


def test_rows_without_targets_are_dropped_and_so_are_empty_microbatches():
    mask = [[0, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 1, 1, 0]]
    data, plan = planned("packed", token_mask=mask, sample_mask=[1, 1, 1, 1, 0])
    made = MicrobatchProcessor().microbatches(data, plan, MicrobatchRule(), positions="loss", device=CPU)
    assert [each.rows.tolist() for each in made] == [[0], [3]]


def test_plans_of_several_global_batches_are_concatenated():
    data, plan = planned("packed")
    data.micro_batch_indices = [[[0, 2]], [[0, 1], [1, 3]]]
    made = MicrobatchProcessor().microbatches(data, plan, MicrobatchRule(), positions="all", device=CPU)
    assert [each.rows.tolist() for each in made] == [[0, 1], [2], [3, 4]]


def test_consecutive_rows_are_not_copied():
    data = batch_of([3, 2, 4])
    made = make_microbatch(data, torch.tensor([1, 2]), packed=False, positions="all")
    assert made.data_dict["input_ids"].data_ptr() == data["input_ids"][1:].data_ptr()


def test_rows_without_a_token_to_predict_are_left_out():
    data = batch_of([1, 3, 0])
    made = MicrobatchProcessor().microbatches(
        data, BatchPlan("packed", 8, 8), MicrobatchRule(), positions="all", device=CPU
    )
    assert [each.rows.tolist() for each in made] == [[1]]


def test_padding_may_be_anything():
    data = batch_of([2, 4])
    data["input_ids"][0, 2:] = torch.tensor([-100, 10**6])
    made = make_microbatch(data, torch.tensor([0, 1]), packed=False, positions="all")
    assert made.processed_inputs.input_ids.tolist() == [[1, 2, 0, 0], [101, 102, 103, 104]]


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("lengths", [torch.uint8, torch.int32, torch.int64])
def test_narrow_integers_are_supported(packed, lengths):
    data = batch_of([3, 2])
    wanted = make_microbatch(data, torch.tensor([0, 1]), packed=packed, positions="all")
    data["input_ids"], data["input_lengths"] = data["input_ids"].int(), data["input_lengths"].to(lengths)
    got = make_microbatch(data, torch.tensor([0, 1]), packed=packed, positions="all")
    for name in ("head_positions", "targets", "scatter"):
        assert torch.equal(getattr(got, name), getattr(wanted, name)), name
        assert getattr(got, name).dtype == torch.int64, name
    assert torch.equal(got.processed_inputs.input_ids, wanted.processed_inputs.input_ids)
    assert got.processed_inputs.input_ids.dtype == torch.int64


@pytest.mark.parametrize(("lengths", "row", "ids"), [([3, 2, 0], 1, [101, 102]), ([0, 0], 0, [0])])
def test_a_dummy_is_the_shortest_row_or_one_token(lengths, row, ids):
    data = batch_of(lengths, width=4)
    for packed in (True, False):
        made = make_dummy(data, partial(make_microbatch, packed=packed, positions="all"))
        assert made.is_dummy
        assert made.processed_inputs.input_ids.tolist() == [ids]
        assert len(made.head_positions) == len(ids) - 1
    assert data["input_lengths"].tolist() == lengths
    assert data["name"][row] == made.data_dict["name"][0]


@pytest.mark.parametrize("mode", ["dynamic", "packed"])
def test_padding_to_a_multiple_stays_within_the_limit(mode):
    groups = group_rows([3, 3, 2, 2, 5], BatchPlan(mode, 1, 13), pad_multiple=4)
    lengths = [3, 3, 2, 2, 5]
    for group in groups:
        sizes = [lengths[row] for row in group]
        padded = -(-sum(sizes) // 4) * 4 if mode == "packed" else len(sizes) * (-(-max(sizes) // 4) * 4)
        assert padded <= 13
    with pytest.raises(BatchError, match=r"8 tokens.*may have 7"):
        group_rows([5], BatchPlan(mode, 1, 7), pad_multiple=4)


@pytest.mark.parametrize(("mode", "rows", "tokens"), [("padded", 0, 8), ("padded", -1, 8), ("packed", 1, 0)])
def test_microbatches_of_size_0_are_rejected(mode, rows, tokens):
    with pytest.raises(BatchError, match="must be at least 1"):
        group_rows([3], BatchPlan(mode, rows, tokens))


def test_an_unknown_mode_is_rejected():
    with pytest.raises(BatchError, match="unknown batching mode 'sorted'; use padded, dynamic or packed"):
        group_rows([3], BatchPlan("sorted", 1, 8))


def test_token_types_alone_do_not_make_rows_multimodal():
    data = batch_of([3, 2])
    data["token_type_ids"] = torch.zeros_like(data["input_ids"])
    for packed in (True, False):
        made = make_microbatch(data, torch.tensor([0, 1]), packed=packed, positions="all")
        assert not made.processed_inputs.is_multimodal
        assert made.processed_inputs.position_ids is not None
