"""Global batches: their rows, and the counts that losses divide by."""

from __future__ import annotations

from functools import partial

import torch

from rlframework.base.errors import BatchError
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.data_processor.processor_harness import ProcessorHarness
from rlframework_conformance.suites.data_processor.rows import batch_of


class GlobalBatches(Suite):
    """`process_global_batch`."""

    @holds(1)
    def test_a_global_batch_is_its_own_rows_in_their_order(self, harness: ProcessorHarness) -> None:
        """Global batch k of size n must be rows k n to (k + 1) n of every field, in order."""
        data = batch_of([3, 2, 4, 1, 5, 2])
        second = harness.global_batch(data, batch_idx=1, batch_size=2)["batch"]
        harness.equal("the names of the second two rows", second["name"], ["row 2", "row 3"])
        for key in ("input_ids", "input_lengths", "token_mask", "sample_mask", "advantages", "reward"):
            harness.exact(f"{key} of the second two rows", second[key], data[key][2:4])

    @holds(1)
    def test_a_global_batch_is_as_long_as_the_driver_dealt_it(self, harness: ProcessorHarness) -> None:
        """A global batch must have the number of rows that the driver planned for this shard.

        Shards of dynamic and packed batches have uneven numbers of rows per global batch.
        """
        data = batch_of([3, 2, 4, 1, 5])
        data.elem_counts_per_gb = [2, 3]
        data.micro_batch_indices = [[[0, 2]], [[0, 1], [1, 3]]]
        data.micro_batch_lengths = [[5], [4, 6]]
        second = harness.global_batch(data, batch_idx=1, batch_size=2)["batch"]
        harness.equal("the names of the rows", second["name"], ["row 2", "row 3", "row 4"])
        harness.equal("the plan of these rows", second.micro_batch_indices, [[[0, 1], [1, 3]]])

    @holds(2)
    def test_targets_of_rows_that_count_are_counted(self, harness: ProcessorHarness) -> None:
        """Counts must exclude first tokens, which nothing predicts, and rows whose sample_mask is 0."""
        mask = [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]]
        data = batch_of([4, 3, 4, 4], token_mask=mask, sample_mask=[1, 1, 0, 1])
        found = harness.global_batch(data)
        harness.scalar("global_valid_seqs of rows 0, 1 and 3", found["global_valid_seqs"], 3, 0.0)
        harness.scalar(
            "global_valid_toks: two of row 0, one of row 1, one of row 3", found["global_valid_toks"], 4, 0.0
        )

    @holds(1)
    def test_counts_are_scalars_in_fp32(self, harness: ProcessorHarness) -> None:
        """Counts must be fp32 scalars, because losses divide by them and would inherit another dtype or shape."""
        found = harness.global_batch(batch_of([3, 2]))
        for name in ("global_valid_seqs", "global_valid_toks"):
            harness.equal(f"the dtype of {name}", found[name].dtype, torch.float32)
            harness.equal(f"the shape of {name}", tuple(found[name].shape), ())

    @holds(2)
    def test_counts_of_nothing_are_zero(self, harness: ProcessorHarness) -> None:
        """Counts of a fully masked batch must be 0; the worker then takes no step."""
        found = harness.global_batch(batch_of([3, 2], sample_mask=[0, 0]))
        harness.scalar("global_valid_seqs", found["global_valid_seqs"], 0, 0.0)
        harness.scalar("global_valid_toks", found["global_valid_toks"], 0, 0.0)

    @holds(2)
    def test_counts_are_summed_over_ranks(self, harness: ProcessorHarness) -> None:
        """Counts must be summed over ranks: (2 rows, 3 tokens) and (1 row, 4 tokens) give the same sums on both."""
        first = batch_of([3, 2], token_mask=[[0, 1, 1], [0, 1, 0]])
        second = batch_of([5, 4], sample_mask=[1, 0])
        for rank, (seqs, toks) in enumerate(harness.counts_on_ranks([first, second])):
            harness.scalar(f"global_valid_seqs on rank {rank} of 2", seqs, 3, 0.0)
            harness.scalar(f"global_valid_toks on rank {rank} of 2", toks, 7, 0.0)

    @holds(8)
    def test_masks_that_are_missing_or_do_not_fit_are_refused(self, harness: ProcessorHarness) -> None:
        """Missing masks and masks of the wrong shape must raise a `BatchError`, never be guessed or broadcast."""
        data = batch_of([3, 2])
        del data["sample_mask"]
        harness.raises(BatchError, lambda: harness.global_batch(data), "a batch without sample_mask", "sample_mask")
        for key, wrong in (("sample_mask", torch.ones(2, 3)), ("token_mask", torch.ones(2, 1))):
            bad = batch_of([3, 2])
            bad[key] = wrong
            what = f"{key} of shape {list(wrong.shape)} for 2 rows of 3"
            harness.raises(BatchError, partial(harness.global_batch, bad), what, key)
