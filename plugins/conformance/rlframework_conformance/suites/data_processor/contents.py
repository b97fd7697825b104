"""Global batches with the counts that losses divide by, and microbatches as the model and the head receive them."""

from __future__ import annotations

from functools import partial
from itertools import product
from typing import Any

import torch

from rlframework.base.errors import BatchError
from rlframework.interfaces.data_processor import Microbatch
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
    round_up,
    targets_of,
)


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


_MULTIPLES = (1, 4)


class ModelInputs(Suite):
    """`ProcessedInputs` of each microbatch."""

    @holds(1)
    def test_padded_rows_stand_under_each_other_with_padding_on_the_right(self, harness: ProcessorHarness) -> None:
        """Padded rows must be as wide as the longest row, rounded up to the multiple, and no wider."""
        for case, data in enumerate(ragged_batches()):
            for plan in (PADDED, DYNAMIC):
                for multiple in _MULTIPLES:
                    for made in harness.microbatches(data, plan, pad_multiple=multiple):
                        _padded_rows(harness, f"batch {case}, {plan.mode}, padded to {multiple}", data, made, multiple)

    @holds(1)
    def test_packed_sequences_follow_each_other(self, harness: ProcessorHarness) -> None:
        """Packed sequences must follow each other in the order of `rows`, with padding only at the end."""
        for case, data in enumerate(ragged_batches()):
            for multiple in _MULTIPLES:
                for made in harness.microbatches(data, PACKED, pad_multiple=multiple):
                    what = f"batch {case}, padded to {multiple}"
                    rows, inputs = made.rows.tolist(), made.processed_inputs
                    ids = data["input_ids"].tolist()
                    joined = [token for row in rows for token in ids[row][: lengths_of(data)[row]]]
                    width = round_up(len(joined), multiple)
                    harness.equal(f"the shape of a packed row ({what})", tuple(inputs.input_ids.shape), (1, width))
                    harness.equal(f"seq_len ({what})", inputs.seq_len, width)
                    harness.equal(f"the packed tokens ({what})", inputs.input_ids[0, : len(joined)].tolist(), joined)

    @holds(1)
    def test_positions_start_again_with_each_packed_sequence(self, harness: ProcessorHarness) -> None:
        """Position ids must restart at 0 for each packed sequence."""
        for case, data in enumerate(ragged_batches()):
            for made in harness.microbatches(data, PACKED):
                lengths = lengths_of(data, made.rows.tolist())
                positions = made.processed_inputs.position_ids
                harness.require(positions is not None, f"a packed row has position_ids (batch {case})")
                expected = [position for length in lengths for position in range(length)]
                got = [] if positions is None else positions[0].tolist()
                harness.equal(f"position_ids of sequences of {lengths} tokens (batch {case})", got, expected)

    @holds(1)
    def test_bounds_of_packed_sequences_are_their_ends(self, harness: ProcessorHarness) -> None:
        """`cu_seqlens` must be [0, a, a + b, ...] in int32 on the CPU, plus one entry if there is padding.

        Attention separates sequences by it.
        """
        for case, data in enumerate(ragged_batches()):
            for multiple in _MULTIPLES:
                for made in harness.microbatches(data, PACKED, pad_multiple=multiple):
                    _bounds(harness, f"batch {case}, padded to {multiple}", data, made)
            for made in harness.microbatches(data, PADDED):
                harness.require(made.cu_seqlens is None, "padded rows have no cu_seqlens", got=made.cu_seqlens)

    @holds(2)
    def test_lengths_are_padded_to_the_multiple_of_the_engine(self, harness: ProcessorHarness) -> None:
        """Widths must be divisible by the engine's multiple: context and sequence parallelism need equal shards."""
        for multiple in (2, 8):
            for plan in PLANS:
                for made in harness.microbatches(batch_of([3, 5, 7, 2, 9]), plan, pad_multiple=multiple):
                    width = made.processed_inputs.input_ids.shape[1]
                    harness.equal(f"{plan.mode}: {width} tokens over the multiple {multiple}", width % multiple, 0)

    @holds(2)
    def test_the_batch_itself_is_not_changed(self, harness: ProcessorHarness) -> None:
        """The processor must not modify the batch, which is scored, trained on and scored again."""
        for plan in PLANS:
            data, untouched = batch_of([3, 5, 0, 1, 4], width=7), batch_of([3, 5, 0, 1, 4], width=7)
            harness.global_batch(data)
            for positions in ("all", "token_mask", "loss"):
                harness.microbatches(data, plan, positions, pad_multiple=4)
            harness.equal("the keys of the batch", sorted(data), sorted(untouched))
            for key, value in untouched.items():
                if isinstance(value, torch.Tensor):
                    harness.exact(f"{key} of the batch after {plan.mode} microbatches", data[key], value)
                else:
                    harness.equal(f"{key} of the batch after {plan.mode} microbatches", data[key], value)


def _padded_rows(harness: ProcessorHarness, what: str, data: Any, made: Any, multiple: int) -> None:
    rows, inputs = made.rows.tolist(), made.processed_inputs
    lengths = lengths_of(data, rows)
    width = round_up(max(lengths), multiple)
    harness.equal(f"the shape of padded rows ({what})", tuple(inputs.input_ids.shape), (len(rows), width))
    harness.equal(f"the dtype of input_ids ({what})", inputs.input_ids.dtype, torch.int64)
    harness.equal(f"seq_len ({what})", inputs.seq_len, width)
    for place, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        harness.exact(
            f"tokens of row {row} ({what})", inputs.input_ids[place, :length].cpu(), data["input_ids"][row, :length]
        )
        if inputs.position_ids is not None:
            got = inputs.position_ids[place, :length].tolist()
            harness.equal(f"position_ids of row {row} ({what})", got, list(range(length)))


def _bounds(harness: ProcessorHarness, what: str, data: Any, made: Any) -> None:
    bounds = made.cu_seqlens
    harness.require(bounds is not None, f"a packed row has cu_seqlens ({what})")
    harness.equal(f"dtype and device of cu_seqlens ({what})", (bounds.dtype, bounds.device.type), (torch.int32, "cpu"))
    expected = [0]
    for length in lengths_of(data, made.rows.tolist()):
        expected.append(expected[-1] + length)
    got, width = bounds.tolist(), made.processed_inputs.seq_len
    with_tail = [*expected, width] if width > expected[-1] else expected
    harness.require(
        got in (expected, with_tail), f"cu_seqlens are the boundaries ({what})", got=got, expected=with_tail
    )


class HeadPlaces(Suite):
    """`head_positions`, `targets` and `scatter` of each microbatch."""

    @holds(1)
    def test_the_head_runs_at_the_token_before_each_target(self, harness: ProcessorHarness) -> None:
        """The log-probability of token i must be computed at position i - 1 and stored at i."""
        for case, data in enumerate(ragged_batches()):
            for plan in PLANS:
                for made in harness.microbatches(data, plan):
                    _head(harness, f"batch {case}, {plan.mode}", data, made, "all")

    @holds(1)
    def test_the_head_runs_where_the_token_mask_asks_only(self, harness: ProcessorHarness) -> None:
        """The head must run only at requested positions; other results would cost time and enter the loss."""
        for case, data in enumerate(ragged_batches()):
            for positions in ("token_mask", "loss"):
                for plan in PLANS:
                    for made in harness.microbatches(data, plan, positions, pad_multiple=4):
                        _head(harness, f"batch {case}, {plan.mode}, {positions}", data, made, positions)

    @holds(1)
    def test_scores_are_read_at_the_last_token(self, harness: ProcessorHarness) -> None:
        """With positions="last", the head must run at each row's last token, and its target must be that token.

        Rows of 2, 0, 1 and 4 tokens give the tokens 2, 201 and 304; with "loss_last", those of rows that count.
        """
        data = batch_of([2, 0, 1, 4], width=6, sample_mask=[1, 1, 0, 1])
        for plan, (positions, right) in product(PLANS, (("last", [2, 201, 304]), ("loss_last", [2, 304]))):
            found = []
            for made in harness.microbatches(data, plan, positions):
                rows, inputs = made.data_dict["input_ids"], made.processed_inputs.input_ids.flatten()
                at_the_head, kept = inputs[made.head_positions], rows.flatten()[made.scatter]
                harness.equal(f"tokens where the head of {plan.mode} rows runs", at_the_head.tolist(), kept.tolist())
                harness.equal(f"targets of {plan.mode} rows", made.targets.tolist(), kept.tolist())
                found += kept.tolist()
            harness.equal(f"the last tokens of {plan.mode} rows, {positions}", sorted(found), right)

    @holds(1)
    def test_a_row_of_one_token_or_none_has_no_target(self, harness: ProcessorHarness) -> None:
        """Rows of one token or none must have no target and raise no error, even if the batch has only such rows."""
        for lengths, expected in (([0, 1, 3, 0], [202, 203]), ([1, 0], [])):
            for plan in PLANS:
                made = harness.microbatches(batch_of(lengths, width=4), plan)
                targets = sorted(target for each in made for target in each.targets.tolist())
                harness.equal(f"the targets of {plan.mode} rows of {lengths} tokens", targets, expected)


def _head(harness: ProcessorHarness, what: str, data: Any, made: Microbatch, positions: str) -> None:
    """Compare with the positions computed from each row, in the order of the head's positions."""
    ids, rows = data["input_ids"].tolist(), made.rows.tolist()
    lengths, length = lengths_of(data, rows), made.processed_inputs.seq_len
    width, packed = max(lengths), made.cu_seqlens is not None
    expected = []
    for place, row in enumerate(rows):
        start = sum(lengths[:place]) if packed else place * length
        expected += [(start + c - 1, ids[row][c], place * width + c) for c in targets_of(data, row, positions)]
    tensors = (made.head_positions, made.targets, made.scatter)
    for name, tensor in zip(("head_positions", "targets", "scatter"), tensors, strict=True):
        kind = (tensor.dtype, tensor.device.type)
        harness.equal(f"dtype and device of {name} ({what})", kind, (torch.int64, harness.device))
        harness.equal(f"the number of {name} ({what})", tuple(tensor.shape), (len(expected),))
    got = sorted(zip(*(tensor.tolist() for tensor in tensors), strict=True))
    for index, name in enumerate(("head_positions", "targets", "scatter")):
        of = "" if name == "head_positions" else " at each of them"
        harness.equal(
            f"{name}{of} ({what})", [triple[index] for triple in got], [triple[index] for triple in sorted(expected)]
        )
