"""Where the head runs, which token it is asked for, and where its value belongs."""

from __future__ import annotations

from typing import Any

import torch

from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.suites.data_processor.rows import PLANS, batch_of, lengths_of, ragged_batches, targets_of
from rlframework.conformance.suites.data_processor.workbench import ProcessorBench
from rlframework.interfaces.data_processor import Microbatch


class HeadPlaces(Suite):
    """`head_positions`, `targets` and `scatter` of each microbatch."""

    @holds(1)
    def test_the_head_runs_at_the_token_before_each_target(self, bench: ProcessorBench) -> None:
        """logprobs[:, i] = log p(token i | tokens before i): computed at i - 1, asked for token i, kept at i."""
        for case, data in enumerate(ragged_batches()):
            for plan in PLANS:
                for made in bench.microbatches(data, plan):
                    _head(bench, f"batch {case}, {plan.mode}", data, made, "all")

    @holds(1)
    def test_the_head_runs_where_the_token_mask_asks_only(self, bench: ProcessorBench) -> None:
        """The head is much of the work, and what it computes elsewhere would be learned from."""
        for case, data in enumerate(ragged_batches()):
            for positions in ("token_mask", "loss"):
                for plan in PLANS:
                    for made in bench.microbatches(data, plan, positions, pad_multiple=4):
                        _head(bench, f"batch {case}, {plan.mode}, {positions}", data, made, positions)

    @holds(1)
    def test_scores_are_read_at_the_last_token(self, bench: ProcessorBench) -> None:
        """With positions="last", of rows of 2, 0, 1 and 4 tokens: tokens 2, 201 and 304, each its own target."""
        data = batch_of([2, 0, 1, 4], width=6)
        for plan in PLANS:
            found = []
            for made in bench.microbatches(data, plan, "last"):
                rows, inputs = made.data_dict["input_ids"], made.processed_inputs.input_ids.flatten()
                at_the_head, kept = inputs[made.head_positions], rows.flatten()[made.scatter]
                bench.equal(f"tokens where the head of {plan.mode} rows runs", at_the_head.tolist(), kept.tolist())
                bench.equal(f"targets of {plan.mode} rows", made.targets.tolist(), kept.tolist())
                found += kept.tolist()
            bench.equal(f"the last tokens of {plan.mode} rows", sorted(found), [2, 201, 304])

    @holds(1)
    def test_padding_is_no_target(self, bench: ProcessorBench) -> None:
        """Rows of 2, 4 and 3 tokens in 8 columns have 1 + 3 + 2 targets, whatever stands behind them."""
        for plan in PLANS:
            targets = [
                target
                for made in bench.microbatches(batch_of([2, 4, 3], width=8), plan)
                for target in made.targets.tolist()
            ]
            bench.equal(f"the targets of {plan.mode} rows", sorted(targets), [2, 102, 103, 104, 202, 203])

    @holds(1)
    def test_a_row_of_one_token_or_none_has_no_target(self, bench: ProcessorBench) -> None:
        """They are in no way an error: an answer may be empty. A batch may hold nothing else."""
        for lengths, expected in (([0, 1, 3, 0], [202, 203]), ([1, 0], [])):
            for plan in PLANS:
                made = bench.microbatches(batch_of(lengths, width=4), plan)
                targets = sorted(target for each in made for target in each.targets.tolist())
                bench.equal(f"the targets of {plan.mode} rows of {lengths} tokens", targets, expected)


def _head(bench: ProcessorBench, what: str, data: Any, made: Microbatch, positions: str) -> None:
    """Compare with what follows from each row, in the order of the head's positions."""
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
        bench.equal(f"dtype and device of {name} ({what})", kind, (torch.int64, bench.device))
        bench.equal(f"the number of {name} ({what})", tuple(tensor.shape), (len(expected),))
    got = sorted(zip(*(tensor.tolist() for tensor in tensors), strict=True))
    for index, name in enumerate(("head_positions", "targets", "scatter")):
        of = "" if name == "head_positions" else " at each of them"
        bench.equal(
            f"{name}{of} ({what})", [triple[index] for triple in got], [triple[index] for triple in sorted(expected)]
        )
