"""Global batches: which rows, and what losses are divided by."""

from __future__ import annotations

from functools import partial

import torch

from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.data_processor.rows import batch_of
from rlframework.conformance.suites.data_processor.workbench import ProcessorBench
from rlframework.errors import BatchError


class GlobalBatches(Suite):
    """`process_global_batch`."""

    @holds(1)
    def test_a_global_batch_is_its_own_rows_in_their_order(self, bench: ProcessorBench) -> None:
        """Global batch k of n rows is rows k n to (k + 1) n, of everything that has rows."""
        data = batch_of([3, 2, 4, 1, 5, 2])
        second = bench.global_batch(data, batch_idx=1, batch_size=2)["batch"]
        bench.equal("the names of the second two rows", second["name"], ["row 2", "row 3"])
        for key in ("input_ids", "input_lengths", "token_mask", "sample_mask", "advantages", "reward"):
            bench.exact(f"{key} of the second two rows", second[key], data[key][2:4])

    @holds(1)
    def test_a_global_batch_is_as_long_as_the_driver_dealt_it(self, bench: ProcessorBench) -> None:
        """Shards of dynamic and packed batches hold uneven numbers of rows of each global batch."""
        data = batch_of([3, 2, 4, 1, 5])
        data.elem_counts_per_gb = [2, 3]
        data.micro_batch_indices = [[[0, 2]], [[0, 1], [1, 3]]]
        data.micro_batch_lengths = [[5], [4, 6]]
        second = bench.global_batch(data, batch_idx=1, batch_size=2)["batch"]
        bench.equal("the names of the rows", second["name"], ["row 2", "row 3", "row 4"])
        bench.equal("the plan that comes with them", second.micro_batch_indices, [[[0, 1], [1, 3]]])

    @holds(2)
    def test_targets_of_rows_that_count_are_counted(self, bench: ProcessorBench) -> None:
        """Not the first token, which nothing predicts, and nothing of a row whose sample_mask is 0."""
        mask = [[1, 1, 1, 0], [1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 1]]
        data = batch_of([4, 3, 4, 4], token_mask=mask, sample_mask=[1, 1, 0, 1])
        found = bench.global_batch(data)
        bench.scalar("global_valid_seqs of rows 0, 1 and 3", found["global_valid_seqs"], 3, 0.0)
        bench.scalar("global_valid_toks: two of row 0, one of row 1, one of row 3", found["global_valid_toks"], 4, 0.0)

    @holds(1)
    def test_counts_are_scalars_in_fp32(self, bench: ProcessorBench) -> None:
        """Losses divide by them: an integer or a tensor of one element would change dtype or shape of a loss."""
        found = bench.global_batch(batch_of([3, 2]))
        for name in ("global_valid_seqs", "global_valid_toks"):
            bench.equal(f"the dtype of {name}", found[name].dtype, torch.float32)
            bench.equal(f"the shape of {name}", tuple(found[name].shape), ())

    @holds(2)
    def test_counts_of_nothing_are_zero(self, bench: ProcessorBench) -> None:
        """The worker takes no step where nothing counts on any rank: it must be able to tell."""
        found = bench.global_batch(batch_of([3, 2], sample_mask=[0, 0]))
        bench.scalar("global_valid_seqs", found["global_valid_seqs"], 0, 0.0)
        bench.scalar("global_valid_toks", found["global_valid_toks"], 0, 0.0)

    @holds(2)
    def test_counts_are_summed_over_ranks(self, bench: ProcessorBench) -> None:
        """Two processes with different rows get the same sums: (2 rows, 3 tokens) and (1 row, 4 tokens)."""
        ours = batch_of([3, 2], token_mask=[[0, 1, 1], [0, 1, 0]])
        theirs = batch_of([5, 4], sample_mask=[1, 0])
        for rank, (seqs, toks) in enumerate(bench.counts_on_ranks([ours, theirs])):
            bench.scalar(f"global_valid_seqs on rank {rank} of 2", seqs, 3, 0.0)
            bench.scalar(f"global_valid_toks on rank {rank} of 2", toks, 7, 0.0)

    @holds(8)
    def test_masks_that_are_missing_or_do_not_fit_are_refused(self, bench: ProcessorBench) -> None:
        """What counts is never guessed, and a mask of another shape would be stretched over the rows in silence."""
        data = batch_of([3, 2])
        del data["sample_mask"]
        bench.refuses(BatchError, lambda: bench.global_batch(data), "a batch without sample_mask", "sample_mask")
        for key, wrong in (("sample_mask", torch.ones(2, 3)), ("token_mask", torch.ones(2, 1))):
            bad = batch_of([3, 2])
            bad[key] = wrong
            what = f"{key} of shape {list(wrong.shape)} for 2 rows of 3"
            bench.refuses(BatchError, partial(bench.global_batch, bad), what, key)
