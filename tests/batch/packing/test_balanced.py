"""`balanced`: never more bins than modified first fit decreasing, similar costs, assigned by cost."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch.packing import TokenCost, get_packer
from rlframework.batch.packing.balanced import BinFiller, initial_loads, least_bins

MANY = settings(deadline=None, max_examples=100)
LINEAR, ATTENTIVE = TokenCost(1.0, 0.0), TokenCost(1.0, 0.01)


def lognormal(rows, seed=0, shift=6.5):
    return np.clip(np.exp(np.random.default_rng(seed).normal(shift, 1, rows)), 32, 8192).astype(int).tolist()


SHAPES = {
    "lognormal": lambda rng, n: np.exp(rng.normal(6.5, 1, n)),
    "uniform": lambda rng, n: rng.uniform(1, 8192, n),
    "halves": lambda rng, n: rng.choice([4096, 4097, 4095], n),
    "thirds": lambda rng, n: rng.choice([2731, 2730, 2732, 1366], n),
    "just over thirds": lambda rng, n: rng.integers(2731, 4096, n),
    "all alike": lambda rng, n: np.full(n, rng.integers(1, 8192)),
    "few long": lambda rng, n: np.where(rng.random(n) < 0.02, 8192, rng.integers(1, 20, n)),
    "padded to 64": lambda rng, n: np.ceil(np.exp(rng.normal(6, 1, n)) / 64) * 64,
    "short": lambda rng, n: rng.integers(60, 300, n),
    "some empty": lambda rng, n: rng.integers(-500, 2000, n),
}


def sums_of(assigned, costs):
    """`[shard, step]` costs."""
    return np.array([[costs[rows].sum() for rows in bins] for bins in assigned])


def check(bins, lengths, capacity):
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(rows and sum(lengths[row] for row in rows) <= capacity for rows in bins)
    assert all(lengths[a] >= lengths[b] for rows in bins for a, b in itertools.pairwise(rows))


@pytest.mark.slow
@MANY
@given(
    st.lists(st.integers(0, 30), max_size=80),
    st.integers(30, 90),
    st.integers(0, 10),
    st.integers(1, 8),
    st.floats(0, 0.2),
)
def test_small_batches_respect_the_cap_and_need_no_more_bins(lengths, capacity, least, multiple, attention):
    options = {"min_bin_count": least, "bin_count_multiple": multiple}
    packer = get_packer("balanced", capacity, cost=TokenCost(1.0, attention), **options)
    positive = [length for length in lengths if length]
    known = len(get_packer("modified_first_fit_decreasing", capacity).pack(positive))
    known = -(-max(known, least, bool(lengths)) // multiple) * multiple
    if len(lengths) < -(-max(1, least) // multiple) * multiple:
        if lengths or least:
            with pytest.raises(BatchError, match="Cannot create"):
                packer.pack(lengths)
        return
    try:
        bins = packer.pack(lengths)
    except BatchError:
        assert len(lengths) < known
        return
    check(bins, lengths, capacity)
    assert len(bins) <= known
    assert len(bins) % multiple == 0
    assert len(bins) >= least
    assert packer.pack(lengths) == bins


@pytest.mark.slow
@settings(deadline=None, max_examples=60)
@given(st.sampled_from(sorted(SHAPES)), st.integers(513, 1500), st.integers(0, 10**6), st.sampled_from([1, 2, 8, 48]))
def test_large_batches_respect_the_cap_and_need_no_more_bins(shape, rows, seed, multiple):
    rng = np.random.default_rng(seed)
    lengths = np.clip(SHAPES[shape](rng, rows), 0 if shape == "some empty" else 1, 8192).astype(int)
    capacity = int(rng.choice([8192, 8192, 10_000, 16_384, 65_536, 400_000]))
    packer = get_packer("balanced", capacity, bin_count_multiple=multiple)
    known = len(get_packer("modified_first_fit_decreasing", capacity).pack(lengths[lengths > 0]))
    known = -(-known // multiple) * multiple
    if known > rows:
        lengths = np.concatenate((lengths, np.zeros(known - rows, dtype=int)))
    bins = packer.pack(lengths)
    check(bins, lengths.tolist(), capacity)
    assert len(bins) <= known
    assert len(bins) % multiple == 0
    assigned = packer.assign_to_shards(bins, lengths, multiple)
    assert sorted(map(tuple, (rows for steps in assigned for rows in steps))) == sorted(map(tuple, bins))


def test_balancing_can_need_fewer_bins_than_first_fit():
    # First fit: 120 of 502 + 254, 40 of three 252, 60 of four 246. Modified: 120 of 502 + 252 + 246, and of the rows
    # that remain 40 of three 254 and 30 of four 246
    lengths = ([502] * 6 + [254] * 6 + [252] * 6 + [246] * 12) * 20
    counts = {
        name: len(get_packer(name, 1000).pack(lengths))
        for name in ("first_fit_decreasing", "modified_first_fit_decreasing", "balanced")
    }
    assert counts == {"first_fit_decreasing": 220, "modified_first_fit_decreasing": 190, "balanced": 180}
    check(get_packer("balanced", 1000).pack(lengths), lengths, 1000)


@pytest.mark.slow
@MANY
@given(st.lists(st.integers(1, 100), min_size=1, max_size=40), st.integers(100, 250))
def test_no_packing_has_fewer_bins_than_the_bound(lengths, capacity):
    bound = least_bins(np.array(lengths), capacity)
    assert bound >= -(-sum(lengths) // capacity)
    for name in ("first_fit_decreasing", "modified_first_fit_decreasing", "concatenative"):
        assert bound <= len(get_packer(name, capacity).pack(lengths))


def test_the_bound_counts_long_rows_that_cannot_share_a_bin():
    assert least_bins(np.array([6, 6, 6]), 10) == 3
    assert least_bins(np.array([5, 5, 5]), 10) == 2
    assert least_bins(np.array([4, 4, 4, 4, 4]), 10) == 3  # the sum would fit into 2


def test_one_bin_a_rank_of_equal_cost():
    # 8 + 1, 7 + 2, 6 + 3, 5 + 4
    bins = get_packer("balanced", 10, bin_count_multiple=4, cost=LINEAR).pack([1, 2, 3, 4, 5, 6, 7, 8])
    assert sorted(map(sorted, bins)) == [[0, 7], [1, 6], [2, 5], [3, 4]]


def test_the_rounded_up_number_of_bins_shares_the_work():
    # One bin of 12 would suffice; three bins are wanted: 4 each, where moving single rows would leave 10, 1, 1
    bins = get_packer("balanced", 12, bin_count_multiple=3, cost=LINEAR).pack([1] * 12)
    assert [len(rows) for rows in bins] == [4, 4, 4]
    bins = get_packer("balanced", 12, min_bin_count=2, bin_count_multiple=3, cost=LINEAR).pack([3, 3, 2, 2, 1, 1])
    assert sorted(sum([3, 3, 2, 2, 1, 1][row] for row in rows) for rows in bins) == [4, 4, 4]


def test_attention_makes_a_long_row_cost_more_than_its_tokens():
    # Cost n + n * n / 10: 120 for the long row, 20 for each short one; equal tokens would be 40 and 50
    lengths = [30, 10, 10, 10, 10, 10, 10]
    packer = get_packer("balanced", 60, bin_count_multiple=2, cost=TokenCost(1.0, 0.1))
    assert sorted(map(sorted, packer.pack(lengths))) == [[0], [1, 2, 3, 4, 5, 6]]


def test_bins_beside_a_dominating_row_are_filled_and_later_steps_get_less():
    # Two ranks, two steps. The four most even bins are 10, 6, 6, 6: 16 in two steps. The row of 10 makes its step
    # 10 long; ten of the rows of 1 in the bin beside it leave 4 and 4 for the second step: 14.
    lengths = [10] + [1] * 18
    packer = get_packer("balanced", 10, min_bin_count=4, bin_count_multiple=2, cost=LINEAR)
    assigned = packer.assign_to_shards(packer.pack(lengths), lengths, 2)
    assert sorted(sums_of(assigned, np.array(lengths)).ravel()) == [4, 4, 10, 10]


def test_no_bin_is_empty_even_if_one_step_could_take_all_rows():
    # The bin beside the row of 16 could take sixteen rows of 1, but each of the four other bins needs one
    lengths = [16] + [1] * 18
    packer = get_packer("balanced", 20, min_bin_count=6, bin_count_multiple=2, cost=LINEAR)
    bins = packer.pack(lengths)
    check(bins, lengths, 20)
    assert len(bins) == 6


def test_rows_of_length_0_are_spread_and_can_form_bins_of_their_own():
    packer = get_packer("balanced", 10, bin_count_multiple=3)
    bins = packer.pack([0, 9, 0, 0, 8, 0, 0])
    check(bins, [0, 9, 0, 0, 8, 0, 0], 10)
    assert sorted(map(len, bins)) == [2, 2, 3]
    assert sorted(map(sorted, packer.pack([0, 0, 0]))) == [[0], [1], [2]]
    assert get_packer("balanced", 10).pack([0, 0]) == [[1, 0]]
    assert packer.assign_to_shards(packer.pack([0, 0, 0]), [0, 0, 0], 3) in [
        [[[a]], [[b]], [[c]]] for a, b, c in ((2, 1, 0), (0, 1, 2))
    ]
    with pytest.raises(BatchError, match="Cannot create 3 bins with only 2 sequences"):
        packer.pack([0, 0])


@pytest.mark.parametrize("rows", [4096, 16_384])
def test_eight_ranks_differ_by_under_two_per_cent_and_wait_for_under_five(rows):
    lengths = lognormal(rows)
    packer = get_packer("balanced", 8192, bin_count_multiple=8)
    bins = packer.pack(lengths)
    assert max(sum(lengths[row] for row in rows) for rows in bins) <= 8192
    assert len(bins) == -(-sum(lengths) // (8192 * 8)) * 8  # the lower bound of any packing
    costs = sums_of(packer.assign_to_shards(bins, lengths, 8), TokenCost().of_rows(lengths))
    ranks = costs.sum(axis=1)
    assert (ranks.max() - ranks.min()) / ranks.mean() < 0.02
    assert costs.max(axis=0).sum() / ranks.mean() < 1.05
    assert (np.diff(costs.max(axis=0)) <= 0).all()  # costliest step first


@pytest.mark.parametrize("seed", range(5))
def test_a_small_batch_waits_less_than_round_robin(seed):
    lengths = lognormal(64, seed)
    waits = {}
    for name in ("balanced", "first_fit_decreasing"):
        packer = get_packer(name, 8192, bin_count_multiple=8)
        costs = sums_of(packer.assign_to_shards(packer.pack(lengths), lengths, 8), TokenCost().of_rows(lengths))
        waits[name] = costs.max(axis=0).sum() / costs.sum(axis=1).mean()
    assert waits["balanced"] < min(1.25, waits["first_fit_decreasing"])


def test_assignment_by_cost_by_hand():
    # Costs 9 8 | 5 3 | 2 1. The 9 goes to shard 0; the 5 to shard 1, which has less (12 and 13 now); the 2 to shard 0
    lengths = [1, 9, 3, 8, 5, 2]
    packer = get_packer("balanced", 9, cost=LINEAR)
    assert packer.assign_to_shards([[0], [1], [2], [3], [4], [5]], lengths, 2) == [[[1], [2], [5]], [[3], [4], [0]]]
    assert packer.assign_to_shards([], [], 2) == [[], []]


@pytest.mark.parametrize(
    ("bins", "lengths", "shards", "error", "message"),
    [
        ([[0], [1], [0]], [1, 2], 2, BatchError, "3 bins do not divide evenly among 2 shards"),
        ([[0], [1]], [1, 2.5], 2, BatchTypeError, "integers"),
        ([[0], [1]], [1, 2], True, BatchTypeError, "shards must be an integer"),
        ([[0], [1]], [1, 2], -2, BatchError, "shards must be at least 1"),
    ],
)
def test_bad_assignments_are_rejected(bins, lengths, shards, error, message):
    with pytest.raises(error, match=message):
        get_packer("balanced", 9).assign_to_shards(bins, lengths, shards)


@pytest.mark.slow
@MANY
@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 6))
def test_every_bin_is_assigned_once_and_all_shards_get_equally_many(lengths, shards):
    lengths = lengths[: len(lengths) // shards * shards]
    packer = get_packer("balanced", 50)
    bins = [[row] for row in range(len(lengths))]
    assigned = packer.assign_to_shards(bins, torch.tensor(lengths, dtype=torch.int64), shards)
    assert [len(steps) for steps in assigned] == [len(lengths) // shards] * shards
    assert sorted(row for steps in assigned for (row,) in steps) == list(range(len(lengths)))
    ordered = sorted(lengths, reverse=True)
    for step in range(len(lengths) // shards):  # each step gets bins of neighbouring cost
        in_step = sorted((lengths[steps[step][0]] for steps in assigned), reverse=True)
        assert in_step == ordered[step * shards :][:shards]


def test_full_bins_raise_the_level_of_the_others():
    filler = BinFiller(np.array([5, 5]), np.array([5.0, 5.0]), np.zeros(2), 20)
    filler.room[0] = 2
    assert filler.level(0) == 8


@pytest.mark.parametrize(("capacity", "fits"), [(8, False), (9, True)])
def test_a_row_that_fits_no_bin_is_reported(capacity, fits):
    filler = BinFiller(np.array([5, 4]), np.array([5.0, 4.0]), np.zeros(1), capacity)
    assert filler.place_all(nearly_full=False) == fits


def test_initial_loads_by_hand():
    # Two bins a step, three steps, 34 in all. The row of 16 makes its step 16 long; the bin beside it may have as much:
    # 2 are left, which are rows of 1 for the second step, and nothing for the third.
    rows = np.array([16.0] + [1.0] * 18)
    assert initial_loads(rows, 6, 2).tolist() == [0, 0, 15, 15, 16, 16]
    assert initial_loads(rows, 2, 2).tolist() == [0, 0]  # one step
    assert initial_loads(rows, 6, 4).tolist() == [0] * 6  # no whole steps
    assert initial_loads(np.ones(12), 6, 2).tolist() == [0] * 6  # no row above the mean


# --- costs of rows


def test_costs_by_hand():
    cost = TokenCost(2.0, 0.5)
    assert cost.of_rows([0, 1, 4]).tolist() == [0.0, 2.5, 16.0]
    assert cost.of_rows(np.array([4], np.int8)).dtype == np.float64


def test_attention_by_the_hidden_size():
    assert TokenCost.for_hidden_size(512) == TokenCost(1.0, 1 / 6144)
    assert TokenCost() == TokenCost.for_hidden_size(2048)
    with pytest.raises(BatchError, match="the hidden size must be at least 1"):
        TokenCost.for_hidden_size(0)


@pytest.mark.parametrize(
    ("linear", "attention", "error", "message"),
    [
        (-1.0, 0.0, BatchError, "linear must be a finite number"),
        (1.0, float("nan"), BatchError, "attention must be a finite number"),
        (float("inf"), 0.0, BatchError, "linear must be a finite number"),
        (0.0, 0.0, BatchError, "at least one must be positive"),
        ("1", 0.0, BatchTypeError, "linear must be a number"),
        (True, 0.0, BatchTypeError, "linear must be a number"),
    ],
)
def test_bad_costs_are_rejected(linear, attention, error, message):
    with pytest.raises(error, match=message):
        TokenCost(linear, attention)
