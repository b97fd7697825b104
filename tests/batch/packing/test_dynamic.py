"""Dynamic batches: by hand, against naive versions, and properties that hold for any input."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch.packing import TokenCost, balanced_microbatches, round_robin_microbatches

MANY = settings(deadline=None, max_examples=100)
LINEAR = TokenCost(1.0, 0.0)


def padded(length, multiple, width):
    length = -(-max(length, 1) // multiple) * multiple
    return length if width is None else min(length, width)


def test_round_robin_by_hand():
    # The second half of an example in the specification, and its first
    assert round_robin_microbatches([3, 9, 5, 16], 16, shards=2, length_round=4, width=16) == (
        [[0, 1], [2, 3]],
        [[0, 1], [1, 2]],
        [8, 16],
    )
    assert round_robin_microbatches([2, 7, 11, 4], 16, shards=2, length_round=4, width=16) == (
        [[0, 1], [3, 2]],
        [[0, 1], [1, 2]],
        [4, 12],
    )


@pytest.mark.slow
@MANY
@given(st.lists(st.integers(0, 20), max_size=40), st.integers(1, 4), st.integers(1, 6), st.integers(24, 80))
def test_round_robin_is_a_walk_over_positions(lengths, shards, multiple, most):
    lengths = lengths[: len(lengths) // shards * shards]
    width = max(lengths, default=0) + 2
    rows, bounds, longest = round_robin_microbatches(lengths, most, shards=shards, length_round=multiple, width=width)
    order = sorted(range(len(lengths)), key=lengths.__getitem__)
    assert rows == [order[shard::shards] for shard in range(shards)]
    expected: list[tuple[int, int, int]] = []  # start, end, length
    for position in range(len(lengths) // shards):
        length = padded(max(lengths[of_shard[position]] for of_shard in rows), multiple, width)
        if expected and (position + 1 - expected[-1][0]) * max(expected[-1][2], length) <= most:
            expected[-1] = (expected[-1][0], position + 1, max(expected[-1][2], length))
        else:
            expected.append((position, position + 1, length))
    assert [(*bound, length) for bound, length in zip(bounds, longest, strict=True)] == expected


def test_balanced_by_hand():
    # 8 8 | 4 4 4 4 in 16 tokens: two microbatches, one a shard
    assert balanced_microbatches([4, 8, 4, 8, 4, 4], 16, shards=2, cost=LINEAR) == [[[3, 1]], [[5, 4, 2, 0]]]
    # One shard gets as few microbatches as the cap allows: 5 x 2, then 2 x 3 and the 1
    assert balanced_microbatches([5, 5, 2, 2, 2, 1], 10, cost=LINEAR) == [[[1, 0], [4, 3, 2, 5]]]


def test_the_number_of_microbatches_that_rounding_up_adds_is_used():
    # All fits into one microbatch of 12; four shards get three rows each
    assigned = balanced_microbatches([1] * 12, 12, shards=4, cost=LINEAR)
    assert [[len(rows) for rows in steps] for steps in assigned] == [[3], [3], [3], [3]]


def test_microbatches_are_balanced_not_halved():
    assigned = balanced_microbatches([1] * 12, 12, shards=3, cost=LINEAR)
    assert [[len(rows) for rows in steps] for steps in assigned] == [[4], [4], [4]]


def test_a_step_that_waits_for_a_long_row_is_filled():
    # 8 | 4 4 and 1 1 | 1 1 take 8 + 2; the four most even microbatches, 8 | 4 and 4 | 1 1 1 1, would take 8 + 4
    assigned = balanced_microbatches([8, 4, 4, 1, 1, 1, 1], 8, shards=2, cost=LINEAR)
    assert sorted(sorted(rows) for steps in assigned for rows in steps) == [[0], [1, 2], [3, 4], [5, 6]]
    assert {tuple(sorted(steps[0])) for steps in assigned} == {(0,), (1, 2)}


def test_rows_without_tokens_first_go_to_empty_microbatches():
    assert sorted(balanced_microbatches([5, 0, 0], 8, shards=3)) == [[[0]], [[1]], [[2]]]
    assigned = balanced_microbatches([5, 5, 0, 0, 0], 5, shards=2)
    assert sorted(len(rows) for steps in assigned for rows in steps) == [2, 3]


def fewest(lengths, most, multiple, width):
    """The fewest microbatches of rows of neighbouring length, by trying all bounds."""
    ordered = sorted((padded(length, multiple, width) for length in lengths if length), reverse=True)
    for count in range(1, len(ordered) + 1):
        for inner in itertools.combinations(range(1, len(ordered)), count - 1):
            edges = [0, *inner, len(ordered)]
            if all((b - a) * ordered[a] <= most for a, b in itertools.pairwise(edges)):
                return count
    return 0


@pytest.mark.slow
@MANY
@given(
    st.lists(st.integers(0, 12), min_size=1, max_size=9),
    st.integers(1, 3),
    st.integers(1, 5),
    st.integers(15, 40),
    st.booleans(),
)
def test_as_few_microbatches_as_the_cap_allows(lengths, shards, multiple, most, narrow):
    width = max(lengths) if narrow else None
    wanted = -(-max(1, fewest(lengths, most, multiple, width)) // shards) * shards
    options = {"shards": shards, "length_round": multiple, "width": width}
    if len(lengths) < wanted:
        with pytest.raises(BatchError, match=f"{len(lengths)} rows cannot fill {wanted} microbatches"):
            balanced_microbatches(lengths, most, **options)
    else:
        assigned = balanced_microbatches(lengths, most, **options)
        assert sum(map(len, assigned)) == wanted


@pytest.mark.slow
@MANY
@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=120),
    st.integers(1, 8),
    st.integers(1, 9),
    st.integers(55, 400),
    st.floats(0, 0.1),
)
def test_every_row_once_and_no_microbatch_over_the_cap(lengths, shards, multiple, most, attention):
    options = {"shards": shards, "length_round": multiple, "cost": TokenCost(1.0, attention), "width": 52}
    lengths += [0] * 130  # enough rows for any number of microbatches
    assigned = balanced_microbatches(lengths, most, **options)
    assert len({len(steps) for steps in assigned}) == 1
    assert len(assigned) == shards
    flat = [rows for steps in assigned for rows in steps]
    assert sorted(row for rows in flat for row in rows) == list(range(len(lengths)))
    for rows in flat:
        assert rows
        with_tokens = [lengths[row] for row in rows if lengths[row]]
        assert len(with_tokens) * padded(max(with_tokens, default=0), multiple, 52) <= most
        assert [lengths[row] for row in rows] == sorted((lengths[row] for row in rows), reverse=True)
    assert balanced_microbatches(torch.tensor(lengths), most, **options) == assigned


@pytest.mark.parametrize("rows", [4096, 16_384])
@pytest.mark.parametrize("most", [8192, 32_768])
def test_eight_ranks_differ_by_under_two_per_cent_and_wait_for_under_five(rows, most):
    lengths = np.clip(np.exp(np.random.default_rng(0).normal(6.5, 1, rows)), 32, 8192).astype(int)
    assigned = balanced_microbatches(lengths, most, shards=8)
    cost = TokenCost()
    costs = np.array([[len(group) * cost.of_rows(lengths[group].max()) for group in steps] for steps in assigned])
    ranks = costs.sum(axis=1)
    assert (ranks.max() - ranks.min()) / ranks.mean() < 0.02
    assert costs.max(axis=0).sum() / ranks.mean() < 1.05
    _, bounds, longest = round_robin_microbatches(lengths, most, shards=8, length_round=1, width=8192)
    known = sum((end - start) * cost.of_rows(length) for (start, end), length in zip(bounds, longest, strict=True))
    assert costs.max(axis=0).sum() < known  # all steps of the slowest rank


@pytest.mark.parametrize("function", [balanced_microbatches, round_robin_microbatches])
@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([-5], BatchError, "length -5"),
        ([5.0], BatchTypeError, "'float'"),
        (np.zeros((2, 2), int), BatchTypeError, "1-D"),
    ],
)
def test_bad_lengths_are_rejected(function, lengths, error, message):
    with pytest.raises(error, match=message):
        function(lengths, 8)


def test_no_rows():
    with pytest.raises(BatchError, match="0 rows cannot fill 1 microbatches"):
        balanced_microbatches([], 8)
    assert round_robin_microbatches([], 8, shards=2, length_round=1, width=4) == ([[], []], [], [])
