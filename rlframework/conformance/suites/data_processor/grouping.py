"""Which rows go into which microbatch."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.data_processor.rows import (
    DYNAMIC,
    PACKED,
    PADDED,
    PLANS,
    batch_of,
    lengths_of,
    ragged_batches,
    rows_with_targets,
)
from rlframework.conformance.suites.data_processor.workbench import ProcessorBench
from rlframework.errors import BatchError
from rlframework.interfaces.data_processor import BatchPlan, Microbatch


class Grouping(Suite):
    """`microbatches`: every row that is work, once, within the limits."""

    @holds(2)
    def test_every_row_with_a_target_is_in_one_microbatch(self, bench: ProcessorBench) -> None:
        """A row left out or done twice changes the loss, and nothing else tells."""
        for case, data in enumerate(ragged_batches()):
            for plan in PLANS:
                rows = [row for made in bench.microbatches(data, plan) for row in made.rows.tolist()]
                what = f"batch {case}, {plan.mode}"
                bench.equal(f"rows in two microbatches ({what})", len(rows) - len(set(rows)), 0)
                missing = sorted(set(rows_with_targets(data, "all")) - set(rows))
                bench.equal(f"rows with targets that are in no microbatch ({what})", missing, [])

    @holds(2)
    def test_rows_without_wanted_targets_are_left_out(self, bench: ProcessorBench) -> None:
        """Rows without a token in token_mask, and in a loss rows whose sample_mask is 0, are no work."""
        mask = [[0, 1, 1], [1, 0, 0], [0, 0, 1]]
        data = batch_of([3, 3, 3], token_mask=mask, sample_mask=[0, 1, 1])
        for positions, expected in (("all", [0, 1, 2]), ("token_mask", [0, 2]), ("loss", [2])):
            for plan in PLANS:
                made = bench.microbatches(data, plan, positions)
                rows = sorted(row for each in made for row in each.rows.tolist())
                bench.equal(f"rows in {plan.mode} microbatches with positions={positions!r}", rows, expected)

    @holds(2)
    def test_no_microbatch_exceeds_the_token_limit(self, bench: ProcessorBench) -> None:
        """The limit is what fits into memory, so it holds for all that the model gets, padding included."""
        for case, data in enumerate(ragged_batches()):
            for plan in (DYNAMIC, PACKED):
                for multiple in (1, 4):
                    sizes = [
                        made.processed_inputs.input_ids.numel()
                        for made in bench.microbatches(data, plan, pad_multiple=multiple)
                    ]
                    what = f"batch {case}, {plan.mode}, padded to {multiple}"
                    largest = max(sizes, default=0)
                    limit = plan.tokens
                    bench.require(
                        largest <= limit, f"no microbatch is over the limit ({what})", got=sizes, expected=limit
                    )

    @holds(2)
    def test_padded_microbatches_have_at_most_the_rows_of_the_plan(self, bench: ProcessorBench) -> None:
        """`rows` is the microbatch size that somebody chose."""
        for case, data in enumerate(ragged_batches()):
            for plan in (PADDED, BatchPlan("padded", 1, 0)):
                sizes = [len(made.rows) for made in bench.microbatches(data, plan)]
                what = f"padded microbatches have at most {plan.rows} rows (batch {case})"
                bench.require(max(sizes, default=0) <= plan.rows, what, got=sizes, expected=plan.rows)

    @holds(2)
    def test_microbatches_that_the_driver_planned_are_kept(self, bench: ProcessorBench) -> None:
        """The driver dealt rows to ranks so that these cost alike; others would make ranks wait for each other."""
        for mode in ("dynamic", "packed"):
            data = batch_of([3, 2, 4, 2, 3])
            data.micro_batch_indices, data.micro_batch_lengths = [[[0, 2], [2, 3], [3, 5]]], [[5, 4, 5]]
            groups = [made.rows.tolist() for made in bench.microbatches(data, BatchPlan(mode, 8, 100))]
            bench.equal(f"the planned {mode} microbatches", groups, [[0, 1], [2], [3, 4]])

    @holds(1)
    def test_rows_say_where_each_row_stands(self, bench: ProcessorBench) -> None:
        """Results find their way back by them, so all that belongs to a row must stand at its place."""
        for case, data in enumerate(ragged_batches()):
            for plan in PLANS:
                for made in bench.microbatches(data, plan):
                    _same_rows(bench, f"batch {case}, {plan.mode}", data, made)

    @holds(8)
    def test_a_row_over_the_token_limit_is_refused(self, bench: ProcessorBench) -> None:
        """It fits into no microbatch: neither may it be cut, nor the limit broken."""
        for mode in ("dynamic", "packed"):
            plan = BatchPlan(mode, 1, 8)
            what = f"a row of 9 tokens in {mode} microbatches of 8"
            bench.refuses(BatchError, partial(bench.microbatches, batch_of([3, 9]), plan), what, "9.*8")
        padded = "a row of 6 tokens, 8 with its padding, in packed microbatches of 7"
        small = BatchPlan("packed", 1, 7)
        bench.refuses(BatchError, lambda: bench.microbatches(batch_of([6]), small, pad_multiple=4), padded, "7")

    @holds(8)
    def test_unknown_positions_are_refused(self, bench: ProcessorBench) -> None:
        """A word that is not one of the three must not mean one of them."""
        data = batch_of([3, 2])
        what = "positions='some'"
        bench.refuses(BatchError, lambda: bench.microbatches(data, PADDED, "some"), what, "some")


def _same_rows(bench: ProcessorBench, what: str, given: BatchedDataDict[Any], made: Microbatch) -> None:
    rows, held = made.rows.tolist(), made.data_dict
    bench.equal(f"the dtype of rows ({what})", made.rows.dtype, torch.int64)
    bench.equal(f"whether it is a dummy, which counts for nothing ({what})", made.is_dummy, False)
    bench.equal(f"names of the rows ({what})", held["name"], [f"row {row}" for row in rows])
    for key in ("input_lengths", "sample_mask", "reward"):
        bench.exact(f"{key} ({what})", held[key].cpu(), given[key][rows])
    shape = (len(rows), max(lengths_of(given, rows)))
    bench.equal(f"the shape of its rows ({what})", tuple(held["input_ids"].shape), shape)
    bench.equal(f"original_* ({what})", (made.original_batch_size, made.original_seq_len), shape)
    for place, row in enumerate(rows):
        length = lengths_of(given)[row]
        for key in ("input_ids", "token_mask", "advantages"):
            bench.exact(f"{key} of row {row} ({what})", held[key][place, :length].cpu(), given[key][row, :length])
