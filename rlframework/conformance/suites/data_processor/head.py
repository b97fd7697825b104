"""Where the head runs, which token it scores, and where its result belongs."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.data_processor.harness import ProcessorHarness
from rlframework.conformance.suites.data_processor.rows import PLANS, batch_of, lengths_of, ragged_batches, targets_of
from rlframework.interfaces.data_processor import Microbatch


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

        Rows of 2, 0, 1 and 4 tokens give the tokens 2, 201 and 304.
        """
        data = batch_of([2, 0, 1, 4], width=6)
        for plan in PLANS:
            found = []
            for made in harness.microbatches(data, plan, "last"):
                rows, inputs = made.data_dict["input_ids"], made.processed_inputs.input_ids.flatten()
                at_the_head, kept = inputs[made.head_positions], rows.flatten()[made.scatter]
                harness.equal(f"tokens where the head of {plan.mode} rows runs", at_the_head.tolist(), kept.tolist())
                harness.equal(f"targets of {plan.mode} rows", made.targets.tolist(), kept.tolist())
                found += kept.tolist()
            harness.equal(f"the last tokens of {plan.mode} rows", sorted(found), [2, 201, 304])

    @holds(1)
    def test_padding_is_no_target(self, harness: ProcessorHarness) -> None:
        """Padding must not be a target: rows of 2, 4 and 3 tokens in 8 columns have 1 + 3 + 2 targets."""
        for plan in PLANS:
            targets = [
                target
                for made in harness.microbatches(batch_of([2, 4, 3], width=8), plan)
                for target in made.targets.tolist()
            ]
            harness.equal(f"the targets of {plan.mode} rows", sorted(targets), [2, 102, 103, 104, 202, 203])

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
