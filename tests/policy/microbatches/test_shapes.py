"""The shapes of microbatches on a GPU: how many there are, and how many tokens they add."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.interfaces.data_processor import BatchPlan, MicrobatchRule
from rlframework.policy.microbatches.data_processor import MicrobatchProcessor
from rlframework.policy.microbatches.shapes import Padding, step_up

CPU = torch.device("cpu")


def test_steps_by_hand():
    assert [step_up(value) for value in (0, 1, 7, 15, 16, 17, 32, 33, 1000, 1025)] == [
        *(1, 1, 7, 15, 16),
        *(18, 32, 36, 1024, 1152),
    ]
    assert [step_up(value, 128) for value in (1, 128, 129, 1025, 2049)] == [128, 128, 256, 1152, 2304]


def test_eight_steps_add_at_most_an_eighth_and_a_twenty_fourth_in_the_mean():
    padded = torch.tensor([step_up(value) for value in range(4097, 8193)])
    assert padded.unique().tolist() == list(range(4608, 8193, 512))
    added = padded - torch.arange(4097, 8193)
    assert added.max() == 511
    assert float(added.sum() / torch.arange(4097, 8193).sum()) == pytest.approx(1 / 24, rel=0.01)


@pytest.mark.parametrize(("tokens", "multiple"), [(8192, 1), (8192, 6), (10_000, 1), (1000, 8)])
def test_packed_rows_have_at_most_16_lengths_within_the_limit(tokens, multiple):
    padding, most = Padding(multiple, True, tokens), tokens // multiple * multiple
    totals = range(1, most + 1)
    lengths = [padding.packed(total) for total in totals]
    assert len(set(lengths)) <= 16
    assert all(
        total <= length <= most and length % multiple == 0 for total, length in zip(totals, lengths, strict=True)
    )
    assert sum(lengths) - sum(totals) < len(totals) * max(tokens / 32 + multiple, 64)


def test_a_cpu_pads_to_the_multiple_only():
    exact = Padding(4, False, 100)
    assert (exact.packed(9), exact.width(9), exact.rows(17, 12)) == (12, 12, 17)


@pytest.mark.parametrize(
    ("mode", "bound", "more"),
    [
        ("packed", 16, 1 / 16),  # multiples of 128
        (
            "dynamic",
            42,
            1 / 8,
        ),  # up to 16 rows of 128 tokens, 8 of 256, 5 of 384, 4 of 512, 3 of 640, 2 of 768 to 1,024
        ("padded", 8, 1 / 8),  # 16 rows of multiples of 128
    ],
)
def test_shapes_do_not_grow_in_number_with_the_rows(mode, bound, more):
    generator, plan = torch.Generator().manual_seed(0), BatchPlan(mode, 16, 2048)
    shapes: dict[bool, set[tuple[int, ...]]] = {True: set(), False: set()}
    tokens = dict.fromkeys(shapes, 0)
    for _ in range(20):
        lengths = torch.randint(2, 1025, (32,), generator=generator)
        ids = torch.zeros(32, 1024, dtype=torch.int64)
        batch: BatchedDataDict[Any] = BatchedDataDict({"input_ids": ids, "input_lengths": lengths})
        for few, seen in shapes.items():
            rule = MicrobatchRule(few_shapes=few)
            for made in MicrobatchProcessor().microbatches(batch, plan, rule, positions="all", device=CPU):
                inputs = made.processed_inputs.input_ids
                seen.add(tuple(inputs.shape))
                tokens[few] += inputs.numel()
    assert len(shapes[True]) <= bound < len(shapes[False])
    assert tokens[False] < tokens[True] < (1 + more) * tokens[False]
