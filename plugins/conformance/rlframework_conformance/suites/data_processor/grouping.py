"""The assignment of rows to microbatches. Contract 13: rows with equal `group_ids` share one if the plan says so."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from rlframework.base.errors import BatchError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.data_processor import BatchPlan, Microbatch
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.data_processor.processor_harness import (
    DYNAMIC,
    PACKED,
    PADDED,
    PLANS,
    ProcessorHarness,
    batch_of,
    lengths_of,
    ragged_batches,
    rows_with_targets,
)


class Grouping(Suite):
    """`microbatches`: every row with work exactly once, within the limits."""

    @holds(2)
    def test_every_row_with_a_target_is_in_one_microbatch(self, harness: ProcessorHarness) -> None:
        """Every row with a target must be in exactly one microbatch; nothing else would reveal the wrong loss."""
        for case, data in enumerate(ragged_batches()):
            for plan in PLANS:
                rows = [row for made in harness.microbatches(data, plan) for row in made.rows.tolist()]
                what = f"batch {case}, {plan.mode}"
                harness.equal(f"rows in two microbatches ({what})", len(rows) - len(set(rows)), 0)
                missing = sorted(set(rows_with_targets(data, "all")) - set(rows))
                harness.equal(f"rows with targets that are in no microbatch ({what})", missing, [])

    @holds(2)
    def test_rows_without_wanted_targets_are_left_out(self, harness: ProcessorHarness) -> None:
        """Rows without requested targets must be skipped: those without token_mask, and for a loss masked rows."""
        mask = [[0, 1, 1], [1, 0, 0], [0, 0, 1]]
        data = batch_of([3, 3, 3], token_mask=mask, sample_mask=[0, 1, 1])
        for positions, expected in (("all", [0, 1, 2]), ("token_mask", [0, 2]), ("loss", [2]), ("loss_last", [1, 2])):
            for plan in PLANS:
                made = harness.microbatches(data, plan, positions)
                rows = sorted(row for each in made for row in each.rows.tolist())
                harness.equal(f"rows in {plan.mode} microbatches with positions={positions!r}", rows, expected)

    @holds(2)
    def test_no_microbatch_exceeds_the_token_limit(self, harness: ProcessorHarness) -> None:
        """No microbatch may exceed the token limit, padding included, because the limit is what fits into memory."""
        for case, data in enumerate(ragged_batches()):
            for plan in (DYNAMIC, PACKED):
                for multiple in (1, 4):
                    sizes = [
                        made.processed_inputs.input_ids.numel()
                        for made in harness.microbatches(data, plan, pad_multiple=multiple)
                    ]
                    what = f"batch {case}, {plan.mode}, padded to {multiple}"
                    largest = max(sizes, default=0)
                    limit = plan.tokens
                    harness.require(
                        largest <= limit, f"no microbatch is over the limit ({what})", got=sizes, expected=limit
                    )

    @holds(2)
    def test_padded_microbatches_have_at_most_the_rows_of_the_plan(self, harness: ProcessorHarness) -> None:
        """Padded microbatches must have at most `rows` rows, the configured microbatch size."""
        for case, data in enumerate(ragged_batches()):
            for plan in (PADDED, BatchPlan("padded", 1, 0)):
                sizes = [len(made.rows) for made in harness.microbatches(data, plan)]
                what = f"padded microbatches have at most {plan.rows} rows (batch {case})"
                harness.require(max(sizes, default=0) <= plan.rows, what, got=sizes, expected=plan.rows)

    @holds(2)
    def test_microbatches_that_the_driver_planned_are_kept(self, harness: ProcessorHarness) -> None:
        """Microbatches planned by the driver must be kept, because the driver balanced their cost across ranks."""
        for mode in ("dynamic", "packed"):
            data = batch_of([3, 2, 4, 2, 3])
            data.micro_batch_indices, data.micro_batch_lengths = [[[0, 2], [2, 3], [3, 5]]], [[5, 4, 5]]
            groups = [made.rows.tolist() for made in harness.microbatches(data, BatchPlan(mode, 8, 100))]
            harness.equal(f"the planned {mode} microbatches", groups, [[0, 1], [2], [3, 4]])

    @holds(1)
    def test_rows_say_where_each_row_stands(self, harness: ProcessorHarness) -> None:
        """`rows` must give each row's index in the batch, and all fields of a row must be at the same place."""
        for case, data in enumerate(ragged_batches()):
            for plan in PLANS:
                for made in harness.microbatches(data, plan):
                    _same_rows(harness, f"batch {case}, {plan.mode}", data, made)

    @holds(8)
    def test_a_row_over_the_token_limit_is_refused(self, harness: ProcessorHarness) -> None:
        """A row above the token limit must raise a `BatchError`; it may be neither truncated nor let through."""
        for mode in ("dynamic", "packed"):
            plan = BatchPlan(mode, 1, 8)
            what = f"a row of 9 tokens in {mode} microbatches of 8"
            harness.raises(BatchError, partial(harness.microbatches, batch_of([3, 9]), plan), what, "9.*8")
        padded = "a row of 6 tokens, 8 with its padding, in packed microbatches of 7"
        small = BatchPlan("packed", 1, 7)
        harness.raises(BatchError, lambda: harness.microbatches(batch_of([6]), small, pad_multiple=4), padded, "7")

    @holds(8)
    def test_unknown_positions_are_refused(self, harness: ProcessorHarness) -> None:
        """An unknown value of `positions` must raise a `BatchError`."""
        data = batch_of([3, 2])
        what = "positions='some'"
        harness.raises(BatchError, lambda: harness.microbatches(data, PADDED, "some"), what, "some")


def _same_rows(harness: ProcessorHarness, what: str, given: BatchedDataDict[Any], made: Microbatch) -> None:
    rows, held = made.rows.tolist(), made.data_dict
    harness.equal(f"the dtype of rows ({what})", made.rows.dtype, torch.int64)
    harness.equal(f"is_dummy ({what})", made.is_dummy, False)
    harness.equal(f"names of the rows ({what})", held["name"], [f"row {row}" for row in rows])
    for key in ("input_lengths", "sample_mask", "reward"):
        harness.exact(f"{key} ({what})", held[key].cpu(), given[key][rows])
    shape = (len(rows), max(lengths_of(given, rows)))
    harness.equal(f"the shape of its rows ({what})", tuple(held["input_ids"].shape), shape)
    harness.equal(f"original_* ({what})", (made.original_batch_size, made.original_seq_len), shape)
    for place, row in enumerate(rows):
        length = lengths_of(given)[row]
        for key in ("input_ids", "token_mask", "advantages"):
            harness.exact(f"{key} of row {row} ({what})", held[key][place, :length].cpu(), given[key][row, :length])


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
