"""The stages of filling bins to equal cost, each against a naive version, and the swaps after them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.batch.packing import TokenCost
from rlframework.batch.packing.bounded_bins import (
    BinState,
    balance_bins,
    fill_limits,
    fill_to_level,
    group_by_bin,
    initial_loads,
    place_remaining,
    place_snaking,
    worst_fit,
)
from rlframework.batch.packing.row_pool import RowPool, SortedRows
from rlframework.batch.packing.swaps import improve_by_swaps

MANY = settings(deadline=None, max_examples=100)
COST = TokenCost(1.0, 0.01)
LINEAR = TokenCost(1.0, 0.0)


def rows_of(lengths, cost=COST):
    return SortedRows(np.array(lengths, dtype=np.int64), cost)


def state_of(bins, capacity):
    return BinState([[] for _ in range(bins)], np.zeros(bins), np.full(bins, capacity, dtype=np.int64))


def drawn(seed, rows, high=1000):
    return np.random.default_rng(seed).integers(1, high, rows)


@MANY
@given(st.lists(st.integers(0, 9), max_size=30))
def test_rows_are_sorted_by_descending_length_and_empty_rows_kept_apart(lengths):
    rows = rows_of(lengths)
    assert sorted([*rows.indices.tolist(), *rows.empty]) == list(range(len(lengths)))
    assert rows.lengths.tolist() == sorted((length for length in lengths if length), reverse=True)
    assert [lengths[row] for row in rows.indices] == rows.lengths.tolist()
    assert rows.tokens == sum(lengths)


@pytest.mark.parametrize(
    ("lengths", "unit"), [([64, 128, 192] * 40, 64), ([64] * 99 + [2], 2), ([6, 9], 3), ([5, 7], 1)]
)
def test_granularity_is_the_common_divisor_of_padded_lengths(lengths, unit):
    assert rows_of(lengths).granularity == unit


@MANY
@given(st.integers(0, 10**6), st.integers(2, 40), st.integers(1, 300))
def test_worst_fit_in_rounds_is_worst_fit_row_by_row(seed, bins, rows):
    lengths = drawn(seed, rows)
    state = state_of(bins, 10**9)
    done = worst_fit(rows_of(lengths), state, rows)
    loads = np.zeros(bins)
    for length in sorted(lengths, reverse=True)[:done]:
        loads[loads.argmin()] += COST.of_rows(length)
    np.testing.assert_allclose(sorted(state.load), sorted(loads))
    assert done == rows or bins < 16 or rows > bins  # it gives up only if rounds get short
    assert sum(map(len, state.bins)) == done
    for members, load, room in zip(state.bins, state.load, state.room, strict=True):
        assert load == pytest.approx(COST.of_rows(lengths[members]).sum())
        assert room == 10**9 - lengths[members].sum()


@MANY
@given(st.integers(0, 10**6), st.integers(2, 30), st.integers(1, 200))
def test_worst_fit_respects_the_room(seed, bins, rows):
    lengths = drawn(seed, rows)
    capacity = max(int(lengths.max()), int(lengths.sum()) // bins)
    state = state_of(bins, capacity)
    done = worst_fit(rows_of(lengths), state, rows)
    assert all(lengths[members].sum() <= capacity for members in state.bins)
    assert done > 0


def test_snaking_goes_back_and_forth_from_the_bin_of_least_load():
    rows = rows_of([9, 8, 7, 6, 5, 4], LINEAR)
    state = state_of(2, 100)
    state.load[:] = [3.0, 0.0]
    assert place_snaking(rows, state, 0, 3) == 6  # 9 and 8, then 6 and 7, then 5 and 4
    assert state.bins == [[1, 2, 5], [0, 3, 4]]
    assert state.load.tolist() == [3.0 + 19, 20.0]
    assert state.room.tolist() == [81, 80]


def test_snaking_places_nothing_if_a_bin_has_too_little_room():
    state = state_of(2, 19)
    assert place_snaking(rows_of([9, 8, 7, 6, 5, 4], LINEAR), state, 0, 3) == 0
    assert state.bins == [[], []]
    assert state.room.tolist() == [19, 19]


@MANY
@given(st.integers(0, 10**6), st.integers(1, 20), st.floats(0.5, 3))
def test_fill_limits_add_up_and_stop_at_one_level(seed, bins, unit):
    rng = np.random.default_rng(seed)
    state = BinState([], rng.uniform(0, 1000, bins), rng.integers(0, 1000, bins))
    tokens = int(rng.integers(1, max(2, state.room.sum())))
    limits = fill_limits(state, unit, tokens)
    assert (limits >= 0).all()
    assert (limits <= state.room).all()
    low, high = 0.0, 1e6  # the level, by bisection
    for _ in range(100):
        middle = (low + high) / 2
        taken = np.clip((middle - state.load) / unit, 0, state.room).sum()
        low, high = (middle, high) if taken < tokens else (low, middle)
    np.testing.assert_allclose(limits, np.clip((high - state.load) / unit, 0, state.room), atol=1.01)


def test_remaining_rows_go_to_the_bin_of_least_load_that_has_room():
    rows = rows_of([5, 4, 3, 2, 1, 1], LINEAR)
    state = state_of(3, 10)
    state.load[:], state.room[:] = [0, 1, 2], [4, 10, 10]
    # 5 does not fit bin 0: to bin 1 (load 6). 4 to bin 2 (load 6; bin 0 was set aside). 3, 2: bins 1 and 2 at 9 and 8;
    # 1 to bin 2 (9), 1 to bin 1
    assert place_remaining(rows, state, rows.indices, rows.lengths)
    assert sorted(map(len, state.bins)) == [0, 3, 3]
    loads = [sum(rows.lengths_by_index[members]) for members in state.bins]
    assert loads == [0, 5 + 3 + 1, 4 + 2 + 1]


def test_a_row_that_fits_no_bin_is_reported():
    rows = rows_of([5, 4], LINEAR)
    assert not place_remaining(rows, state_of(1, 8), rows.indices, rows.lengths)
    assert place_remaining(rows, state_of(1, 9), rows.indices, rows.lengths)


@MANY
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 150), st.floats(1.0, 1.5))
def test_filling_respects_the_room(seed, bins, rows, slack):
    lengths = drawn(seed, rows, 100)
    capacity = int(slack * lengths.sum() / bins) + 100
    state = state_of(bins, capacity)
    everything = rows_of(lengths, LINEAR)
    state.bins = [[] for _ in range(bins)]
    left, _ = fill_to_level(everything, state, 0)
    placed = [row for members in state.bins for row in members]
    assert sorted([*placed, *left.tolist()]) == list(range(rows))
    assert all(lengths[members].sum() <= capacity for members in state.bins)
    if len(left):
        assert state.room.tolist() == [capacity - lengths[members].sum() for members in state.bins]
        place_remaining(everything, state, left, lengths[left])
        assert all(lengths[members].sum() <= capacity for members in state.bins)


@MANY
@given(
    st.lists(st.integers(1, 30), max_size=60), st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=8)
)
def test_a_pool_gives_the_longest_rows_that_fit_and_carries_over_unused_tokens(lengths, rooms):
    order = np.argsort(np.array(lengths, dtype=np.int64), kind="stable")[::-1]
    pool = RowPool(order, np.array(lengths, dtype=np.int64)[order])
    bins = [[] for _ in rooms]
    used = pool.fill([limit for limit, _ in rooms], [room for _, room in rooms], bins)
    left = sorted(lengths, reverse=True)
    shortest, carried, expected = min(lengths, default=0), 0, []
    for limit, most in rooms:
        if not left:
            break
        room = before = min(limit + min(carried, shortest), most)
        taken = []
        while fitting := [length for length in left if length <= room]:
            taken.append(fitting[0])
            left.remove(fitting[0])
            room -= fitting[0]
        carried += limit - (before - room)
        expected.append(taken)
    assert [[lengths[row] for row in members] for members in bins] == expected + [[]] * (len(rooms) - len(expected))
    assert used == [sum(members) for members in expected]
    rest, rest_lengths = pool.rest()
    assert rest_lengths.tolist() == left == [lengths[row] for row in rest]
    assert pool.remaining == len(left)
    assert pool.shortest() == min(left, default=0)
    for room in range(35):
        assert pool.longest_up_to(room) == max((length for length in left if length <= room), default=0)


def test_grouping_by_bin_keeps_the_order():
    assert group_by_bin(np.array([7, 5, 3, 1]), np.array([1, 0, 1, 1]), 3) == [[5], [7, 3, 1], []]
    many = group_by_bin(np.arange(70_000), np.arange(70_000)[::-1], 70_000)
    assert many[0] == [69_999]
    assert many[-1] == [0]


def test_initial_loads_by_hand():
    # Two bins a step, three steps, 34 in all. The row of 16 makes its step 16 long; the bin beside it may have as much
    # (a cap of 20 allows it): 2 are left, which are rows of 1 for the second step, and nothing for the third.
    rows = rows_of([16] + [1] * 18, LINEAR)
    assert initial_loads(rows, 6, 20, 2).tolist() == [0, 0, 15, 15, 16, 16]
    # A cap of 10: the bin beside it gets 10, and 8 are left for four bins
    assert initial_loads(rows, 6, 10, 2).tolist() == [0, 0, 8, 8, 8, 8]
    assert initial_loads(rows, 2, 20, 2).tolist() == [0, 0]  # one step
    assert initial_loads(rows, 6, 20, 4).tolist() == [0] * 6  # no whole steps
    assert initial_loads(rows_of([1] * 12), 6, 20, 2).tolist() == [0] * 6  # no row above the mean


def test_initial_loads_count_all_rows_that_a_long_step_takes():
    # Mean (20 + 5 * 4) / 4 = 10. The first step takes the 20 and, beside it, all the rows of 5: nothing is left
    assert initial_loads(rows_of([20, 5, 5, 5, 5], LINEAR), 4, 100, 2).tolist() == [0, 0, 20, 20]


def test_bins_are_balanced_without_initial_loads_if_these_leave_a_bin_empty():
    bins = balance_bins(rows_of([16] + [1] * 18, LINEAR), 6, 20, 2)
    assert bins is not None
    assert sorted(map(len, bins)) == [1, 3, 3, 4, 4, 4]


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10**6), st.integers(513, 900), st.integers(1, 60), st.integers(1, 4))
def test_balanced_bins_hold_all_rows_or_none_are_returned(seed, rows, count, group):
    lengths = drawn(seed, rows)
    capacity = max(1000, int(lengths.sum() / count * np.random.default_rng(seed).uniform(1, 1.3)))
    bins = balance_bins(rows_of(lengths), count, capacity, group)
    if bins is None:
        return
    assert len(bins) == count
    assert sorted(row for members in bins for row in members) == list(range(rows))
    assert all(members and lengths[members].sum() <= capacity for members in bins)


def test_with_slack_bins_differ_by_about_a_short_row():
    lengths = np.clip(np.exp(np.random.default_rng(0).normal(5, 0.5, 3000)), 20, 2000).astype(np.int64)
    for count in (10, 60, 200, 600):
        bins = balance_bins(SortedRows(lengths, LINEAR), count, int(lengths.sum() / count * 1.05) + 100, 1)
        assert bins is not None
        sums = np.array([lengths[members].sum() for members in bins])
        assert sums.max() - sums.mean() <= 40
        assert len(bins) == count


def test_swaps_find_an_improvement_that_worst_fit_misses():
    # Longest first makes 8 + 5 + 4 and 7 + 6 (17 and 13, with 3 beside it 17 and 16); better: 8 + 6 + 3, 7 + 5 + 4
    rows = rows_of([8, 7, 6, 5, 4, 3], LINEAR)
    bins = improve_by_swaps(rows, [[0, 1, 2], [3, 4, 5]], np.zeros(2), 100)
    sums = sorted(int(rows.lengths_by_index[members].sum()) for members in bins)
    assert sums == [16, 17]


@MANY
@given(st.integers(0, 10**6), st.integers(1, 8), st.integers(0, 60))
def test_swaps_never_make_the_costliest_bin_costlier(seed, count, more):
    rng = np.random.default_rng(seed)
    lengths = drawn(seed, count + more, 100)
    bins = [[row] for row in range(count)]
    for row in range(count, count + more):
        bins[rng.integers(count)].append(row)
    before = np.array([COST.of_rows(lengths[members]).sum() for members in bins])
    capacity = max(int(lengths[members].sum()) for members in bins)
    improved = improve_by_swaps(rows_of(lengths), bins, np.zeros(count), capacity)
    after = np.array([COST.of_rows(lengths[members]).sum() for members in improved])
    assert after.max() <= before.max() + 1e-9
    assert sorted(row for members in improved for row in members) == list(range(count + more))
    assert all(members and lengths[members].sum() <= capacity for members in improved)
    assert all(sorted(members, key=lambda row: -lengths[row]) == members for members in improved) or len(
        set(lengths)
    ) < len(lengths)
