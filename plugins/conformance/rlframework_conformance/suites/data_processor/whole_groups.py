"""Contract 13: rows with equal `group_ids` share a microbatch if the plan asks for groups."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rlframework.base.errors import BatchError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.data_processor import BatchPlan
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.data_processor.processor_harness import ProcessorHarness
from rlframework_conformance.suites.data_processor.rows import DYNAMIC, PACKED, PADDED, batch_of, rows_with_targets

GROUPED = tuple(replace(plan, groups=True) for plan in (PADDED, DYNAMIC, PACKED))
"""One plan per mode, of 3 rows or 24 tokens; groups of at most 3 rows of at most 8 tokens fit."""


def in_groups(data: BatchedDataDict[Any], ids: Sequence[int]) -> BatchedDataDict[Any]:
    """Set the column `group_ids`."""
    data["group_ids"] = torch.tensor(ids, dtype=torch.int64)
    return data


def grouped_batches(count: int = 24) -> Iterator[BatchedDataDict[Any]]:
    """Yield batches of up to 6 groups of 1 to 3 rows of 1 to 8 tokens, their rows mixed, the same ones on every call.

    The ids are not in order, and the masks are random.
    """
    dice = random.Random(13)
    for _ in range(count):
        ids = [id_ for id_ in dice.sample(range(-9, 90), dice.randint(1, 6)) for _ in range(dice.randint(1, 3))]
        dice.shuffle(ids)
        lengths = [dice.randint(1, 8) for _ in ids]
        width = max(lengths) + dice.randint(0, 2)
        mask = [[int(c < length and dice.random() < 0.5) for c in range(width)] for length in lengths]
        sample_mask = [int(dice.random() < 0.7) for _ in ids]
        yield in_groups(batch_of(lengths, width=width, token_mask=mask, sample_mask=sample_mask), ids)


class GroupedRows(Suite):
    """`microbatches` with `BatchPlan.groups`."""

    @holds(13)
    def test_a_microbatch_has_whole_groups(self, harness: ProcessorHarness) -> None:
        """The rows of a group must be in one microbatch, next to each other, in their order in the batch.

        Groups of which no row has a target are left out.
        """
        for case, data in enumerate(grouped_batches()):
            ids = data["group_ids"].tolist()
            counted = {ids[row] for row in rows_with_targets(data, "loss")}
            expected = sorted([row for row in range(data.size) if ids[row] == group] for group in counted)
            for plan in GROUPED:
                found = [
                    group
                    for made in harness.microbatches(data, plan, "loss")
                    for group in _runs(made.rows.tolist(), ids)
                ]
                harness.equal(f"rows of the groups (batch {case}, {plan.mode})", sorted(found), expected)

    @holds(13)
    def test_microbatches_of_groups_keep_the_limit(self, harness: ProcessorHarness) -> None:
        """Whole groups must not make a microbatch exceed its rows or, padding included, its tokens."""
        for case, data in enumerate(grouped_batches()):
            for plan in GROUPED:
                for made in harness.microbatches(data, plan, "loss", pad_multiple=4 if plan.mode == "packed" else 1):
                    tokens = made.processed_inputs.input_ids.numel()
                    size, limit = (len(made.rows), plan.rows) if plan.mode == "padded" else (tokens, plan.tokens)
                    what = f"no microbatch of groups is over the limit (batch {case}, {plan.mode})"
                    harness.require(size <= limit, what, got=size, expected=limit)

    @holds(13)
    def test_group_ids_belong_to_their_rows(self, harness: ProcessorHarness) -> None:
        """A loss reads the ids of its rows from `data_dict`, so they must be sliced as the rows are."""
        for case, data in enumerate(grouped_batches()):
            for plan in GROUPED:
                for made in harness.microbatches(data, plan, "loss"):
                    harness.exact(
                        f"group_ids (batch {case}, {plan.mode})",
                        made.data_dict["group_ids"].cpu(),
                        data["group_ids"][made.rows],
                    )

    @holds(13)
    def test_a_masked_row_of_a_group_stays_with_it(self, harness: ProcessorHarness) -> None:
        """A row that does not count must stay if another row of its group counts; the head must not run for it.

        The rows 0 and 2 are a pair whose second row is masked. Neither row of the other pair counts.
        """
        mask = [[0, 1, 1], [0, 0, 0], [0, 1, 1], [0, 1, 0]]
        data = in_groups(batch_of([3, 3, 3, 3], token_mask=mask, sample_mask=[1, 1, 0, 0]), [4, 2, 4, 2])
        for plan in GROUPED:
            made = harness.microbatches(data, plan, "loss")
            harness.equal(f"rows of {plan.mode} microbatches", [one.rows.tolist() for one in made], [[0, 2]])
            harness.equal(f"targets of the pair ({plan.mode})", made[0].targets.tolist(), [2, 3])

    @holds(13)
    def test_groups_that_the_driver_planned_are_kept(self, harness: ProcessorHarness) -> None:
        """Planned microbatches of groups must be kept in every mode, and rejected if they divide a group."""
        for mode in ("padded", "dynamic", "packed"):
            plan = BatchPlan(mode, 8, 100, groups=True)
            data = in_groups(batch_of([3, 2, 4, 2, 3]), [7, 7, 1, 5, 5])
            data.micro_batch_indices, data.micro_batch_lengths = [[[0, 2], [2, 3], [3, 5]]], [[5, 4, 5]]
            found = [made.rows.tolist() for made in harness.microbatches(data, plan, "loss")]
            harness.equal(f"the planned {mode} microbatches", found, [[0, 1], [2], [3, 4]])
            data["group_ids"][2] = 5
            what = f"{mode} microbatches that divide group 5"
            harness.raises(BatchError, partial(harness.microbatches, data, plan, "loss"), what, "group 5")

    @holds(8)
    def test_a_group_over_the_limit_is_rejected(self, harness: ProcessorHarness) -> None:
        """A group that fits into no microbatch must raise a `BatchError` that names it; it may not be divided.

        Group 8 has four rows, which are 28 tokens padded to 7 each, and 25 tokens packed.
        """
        data = in_groups(batch_of([2, 7, 7, 5, 6]), [3, 8, 8, 8, 8])
        for plan in GROUPED:
            what = f"a group over the limit of {plan.mode} microbatches"
            harness.raises(BatchError, partial(harness.microbatches, data, plan, "loss"), what, "group 8.*4 rows")
        without = batch_of([2, 3])
        harness.raises(BatchError, partial(harness.microbatches, without, GROUPED[0], "loss"), "no ids", "group_ids")


def _runs(rows: list[int], ids: Sequence[int]) -> list[list[int]]:
    """Divide `rows` where the group changes."""
    runs: list[list[int]] = []
    for row in rows:
        if runs and ids[runs[-1][-1]] == ids[row]:
            runs[-1].append(row)
        else:
            runs.append([row])
    return runs
