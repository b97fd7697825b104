"""The established packers: by hand, against naive versions of the same rules, and properties of any input."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch.packing import (
    PackingAlgorithm,
    PackingMetrics,
    get_packer,
)
from rlframework.batch.packing.first_fit import fill_bins

NAMES = [algorithm.name for algorithm in PackingAlgorithm]
ESTABLISHED = NAMES[:-1]
MANY = settings(deadline=None, max_examples=100)


@st.composite
def problems(draw, least=1):
    capacity = draw(st.integers(1, 40))
    lengths = draw(st.lists(st.integers(min(least, capacity), capacity), max_size=60))
    return lengths, capacity


def naive_first_fit(order, lengths, capacity):
    bins = []
    for row in order:
        for rows in bins:
            if sum(lengths[other] for other in rows) + lengths[row] <= capacity:
                rows.append(row)
                break
        else:
            bins.append([row])
    return bins


def naive_modified(lengths, capacity):
    """Modified first fit decreasing, by scanning everything each time; bins of lengths."""
    left = sorted(lengths, reverse=True)
    bins = [[length] for length in left if 2 * length > capacity]
    left = left[len(bins) :]

    def take(low, room):  # the longest of more than `low` that fits
        fitting = [length for length in left if low < length <= room]
        if fitting:
            left.remove(max(fitting))
            return [max(fitting)]
        return []

    for rows in bins:
        rows += take(capacity / 3, capacity - sum(rows))
    for rows in reversed(bins):
        smalls = [length for length in left if capacity / 6 < length <= capacity / 3]
        if len(rows) == 1 and len(smalls) > 1 and sum(sorted(smalls)[:2]) <= capacity - rows[0]:
            left.remove(min(smalls))
            partner = max(x for x in left if capacity / 6 < x <= min(capacity / 3, capacity - rows[0] - min(smalls)))
            left.remove(partner)
            rows += [min(smalls), partner]
    for rows in bins:
        while more := take(0, capacity - sum(rows)):
            rows += more
    new = []
    for length in left:
        if new and min(map(sum, new)) + length <= capacity:
            min(new, key=sum).append(length)
        else:
            new.append([length])
    return bins + new


def as_lengths(bins, lengths):
    return sorted(sorted(lengths[row] for row in rows) for rows in bins)


def test_concatenative_takes_rows_as_they_come():
    packer = get_packer("concatenative", 10)
    assert packer.pack([4, 4, 4, 10, 1, 2]) == [[0, 1], [2], [3], [4, 5]]
    packer.max_sequences_per_bin = 1
    assert packer.pack([4, 4]) == [[0], [1]]


def test_first_fit_decreasing_by_hand():
    # 7 | 6 | 5 | 4 beside 6 | 3 beside 7 | 3 beside 5 | 2 beside 5 and 3 | 1 opens a bin
    assert get_packer("first_fit_decreasing", 10).pack([2, 5, 4, 7, 1, 3, 6, 3]) == [[3, 7], [6, 2], [1, 5, 0], [4]]


def test_of_equal_rows_the_last_is_placed_first():
    assert get_packer("first_fit_decreasing", 2).pack([1, 1, 1]) == [[2, 1], [0]]


def test_modified_first_fit_decreasing_by_hand():
    # capacity 60: large > 30, medium > 20, small > 10. 25 beside 35; 34 takes the smallest small, 11, and the largest
    # that still fits, 15; 12 and 9 find no room with these (60 and 60) and share a bin
    lengths = [35, 34, 25, 15, 12, 11, 9]
    bins = get_packer("modified_first_fit_decreasing", 60).pack(lengths)
    assert as_lengths(bins, lengths) == [[9, 12], [11, 15, 34], [25, 35]]


def test_modified_first_fit_pairs_rows_above_a_sixth_before_it_is_greedy():
    # 35 takes the pair 11 + 12 before 40, which has less room, gets a row; greedy alone would give 12 to 40
    lengths = [40, 35, 12, 11, 11]
    bins = get_packer("modified_first_fit_decreasing", 60).pack(lengths)
    assert as_lengths(bins, lengths) == [[11, 12, 35], [11, 40]]


def test_modified_first_fit_puts_remaining_rows_into_the_emptiest_new_bin():
    # no row above 50: 40 | 40 (80) | 30 opens a bin | 30 (60) | 30 (90) | 20 beside the two of 40
    bins = get_packer("modified_first_fit_decreasing", 100).pack([40, 40, 30, 30, 30, 20])
    assert [sorted(rows) for rows in bins] == [[0, 1, 5], [2, 3, 4]]


@pytest.mark.slow
@MANY
@given(problems())
def test_first_fit_decreasing_is_first_fit(problem):
    lengths, capacity = problem
    order = sorted(range(len(lengths)), key=lambda row: (lengths[row], row), reverse=True)
    assert get_packer("first_fit_decreasing", capacity).pack(lengths) == naive_first_fit(order, lengths, capacity)


@pytest.mark.slow
def test_first_fit_decreasing_is_first_fit_with_many_rows_and_no_two_alike():
    rng = np.random.default_rng(3)
    lengths = rng.choice(np.arange(1, 10_001), 700, replace=False).tolist()
    order = sorted(range(700), key=lengths.__getitem__, reverse=True)
    assert get_packer("first_fit_decreasing", 10_000).pack(lengths) == naive_first_fit(order, lengths, 10_000)


@pytest.mark.slow
@MANY
@given(problems(), st.integers(0, 5))
def test_first_fit_shuffle_is_first_fit_of_the_shuffled_rows(problem, seed):
    lengths, capacity = problem
    order = list(range(len(lengths)))
    random.Random(seed).shuffle(order)
    expected = [sorted(rows) for rows in naive_first_fit(order, lengths, capacity)]
    packer = get_packer("first_fit_shuffle", capacity, seed=seed)
    assert [sorted(rows) for rows in packer.pack(lengths)] == expected
    assert packer.pack(lengths) == packer.pack(lengths)
    random.seed(seed)  # without a seed: Python's generator, seeded as above
    assert [sorted(rows) for rows in get_packer("first_fit_shuffle", capacity).pack(lengths)] == expected


@pytest.mark.slow
@MANY
@given(problems())
def test_modified_first_fit_decreasing_follows_its_rules(problem):
    lengths, capacity = problem
    bins = get_packer("modified_first_fit_decreasing", capacity).pack(lengths)
    assert as_lengths(bins, lengths) == sorted(map(sorted, naive_modified(lengths, capacity)))


@pytest.mark.slow
@MANY
@given(problems(), st.sampled_from(NAMES), st.integers(0, 12), st.integers(1, 5))
def test_every_row_is_packed_once_within_the_cap_into_the_requested_number_of_bins(problem, name, least, multiple):
    lengths, capacity = problem
    plain = get_packer(name, capacity, seed=1).pack(lengths)
    wanted = -(-max(len(plain), least) // multiple) * multiple
    packer = get_packer(name, capacity, min_bin_count=least, bin_count_multiple=multiple, seed=1)
    if len(lengths) < wanted:
        with pytest.raises(BatchError, match=f"Cannot create {wanted} bins with only {len(lengths)} sequences"):
            packer.pack(lengths)
        return
    bins = packer.pack(lengths)
    assert sorted(row for rows in bins for row in rows) == list(range(len(lengths)))
    assert all(rows and sum(lengths[row] for row in rows) <= capacity for rows in bins)
    assert len(bins) == wanted
    if name != "CONCATENATIVE":
        assert all(lengths[a] >= lengths[b] for rows in bins for a, b in itertools.pairwise(rows))


def test_added_bins_get_the_last_row_of_the_bins_with_most_rows():
    # [0 1 2] [3 4] [5]: two more bins wanted; 2 goes, then the first of the bins with two rows gives its last
    packer = get_packer("concatenative", 3, min_bin_count=5)
    assert packer.pack([1, 1, 1, 1, 2, 2]) == [[0], [3, 4], [5], [2], [1]]
    assert len(get_packer("concatenative", 3, bin_count_multiple=4).pack([1, 1, 1, 1, 2, 2])) == 4


@pytest.mark.parametrize("name", NAMES)
def test_lengths_come_as_list_tuple_array_or_tensor(name):
    values = [5, 1, 7, 3, 3, 2]
    expected = get_packer(name, 8, seed=0).pack(values)
    for lengths in (tuple(values), np.array(values, np.int16), torch.tensor(values), torch.tensor(values).byte()):
        assert get_packer(name, 8, seed=0).pack(lengths) == expected
    assert all(type(row) is int for rows in expected for row in rows)
    assert get_packer(name, 8).pack([]) == []


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("lengths", "error", "message"),
    [
        ([3, 11], BatchError, "row 1 of 2 has 11 tokens, but bin_capacity is 10"),
        ([3, -1], BatchError, "row 1 of 2 has length -1"),
        ([2**80], BatchTypeError, "64-bit integers"),
        (np.array([2**63], np.uint64), BatchError, "9223372036854775808"),
        (torch.ones(2, 2, dtype=torch.int64), BatchTypeError, r"1-D .* got int64 \[2, 2\]"),
        ([1.0], BatchTypeError, "'float' object"),
        ([float("nan")], BatchTypeError, "integer"),
        (torch.ones(2), BatchTypeError, "float32"),
        (torch.ones(2, dtype=torch.bfloat16), BatchTypeError, "BFloat16"),
        (torch.ones(2, dtype=torch.int64, device="meta"), BatchTypeError, "meta"),
        ([True, 3], BatchTypeError, "bool"),
        (torch.tensor([True]), BatchTypeError, "bool"),
        (["3"], BatchTypeError, "'str' object"),
        ("33", BatchTypeError, "cannot use a str"),
        ([[1]], BatchTypeError, "'list' object"),
        ({1: 2}, BatchTypeError, "got dict"),
        (None, BatchTypeError, "NoneType"),
    ],
    ids=str,
)
def test_bad_lengths_are_rejected(name, lengths, error, message):
    with pytest.raises(error, match=message) as caught:
        get_packer(name, 10).pack(lengths)
    assert isinstance(caught.value, (ValueError, AssertionError))


@pytest.mark.parametrize("name", ESTABLISHED)
def test_established_packers_reject_rows_without_tokens(name):
    with pytest.raises(BatchError, match="length 0, but it must be at least 1; only the algorithm BALANCED"):
        get_packer(name, 10).pack([3, 0])


def test_packers_are_found_by_name():
    assert get_packer("Balanced", 4).algorithm is PackingAlgorithm.BALANCED
    assert get_packer(PackingAlgorithm.FIRST_FIT_SHUFFLE, 4).algorithm is PackingAlgorithm.FIRST_FIT_SHUFFLE
    with pytest.raises(
        BatchError, match=r"'first_fit_decr'.*Did you mean 'FIRST_FIT_DECREASING'.*CONCATENATIVE, FIRST"
    ):
        get_packer("first_fit_decr", 4)
    with pytest.raises(BatchError, match=r"unknown packing algorithm 'zzz'\. Use one of"):
        get_packer("zzz", 4)
    with pytest.raises(BatchTypeError, match="got a int"):
        get_packer(3, 4)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"bin_capacity": 0}, BatchError, "bin_capacity must be at least 1, got 0"),
        ({"bin_capacity": 2.5}, BatchTypeError, "bin_capacity must be an integer"),
        ({"bin_capacity": True}, BatchTypeError, "bin_capacity must be an integer"),
        ({"bin_capacity": 4, "min_bin_count": -1}, BatchError, "min_bin_count must be at least 0"),
        ({"bin_capacity": 4, "bin_count_multiple": 0}, BatchError, "bin_count_multiple must be at least 1"),
    ],
)
@pytest.mark.parametrize("name", NAMES)
def test_bad_arguments_are_rejected(name, arguments, error, message):
    with pytest.raises(error, match=message):
        get_packer(name, **arguments)


@pytest.mark.parametrize("name", NAMES)
def test_an_unlimited_capacity_gives_one_bin(name):
    assert [sorted(rows) for rows in get_packer(name, 10**30).pack([2**40, 2**40, 7])] == [[0, 1, 2]]


@pytest.mark.parametrize("name", ESTABLISHED)
def test_established_packers_assign_bins_round_robin(name):
    bins = [[0], [1], [2], [3], [4], [5]]
    assert get_packer(name, 9).assign_to_shards(bins, [9, 1, 8, 2, 7, 3], 2) == [[[0], [2], [4]], [[1], [3], [5]]]
    with pytest.raises(BatchError, match="6 bins do not divide evenly among 4 shards"):
        get_packer(name, 9).assign_to_shards(bins, [1] * 6, 4)
    with pytest.raises(BatchError, match="shards must be at least 1"):
        get_packer(name, 9).assign_to_shards(bins, [1] * 6, 0)


def test_metrics_by_hand():
    packer = get_packer("first_fit_decreasing", 10, collect_metrics=True)
    packer.pack([6, 4, 5])  # 10 and 5 of 20
    packer.pack([10, 10])
    packer.pack([])  # does not count
    assert packer.metrics is not None
    assert packer.metrics == [
        PackingMetrics(utilisation=0.75, waste=0.25, balance=0.75, bins=2, rows=3, tokens=15),
        PackingMetrics(utilisation=1.0, waste=0.0, balance=1.0, bins=2, rows=2, tokens=20),
    ]
    assert get_packer("first_fit_decreasing", 10).metrics is None


@pytest.mark.slow
@MANY
@given(st.lists(st.integers(1, 30), max_size=60), st.lists(st.integers(0, 60), max_size=8))
def test_each_bin_is_filled_with_the_longest_rows_that_fit(lengths, rooms):
    order = np.argsort(np.array(lengths, dtype=np.int64), kind="stable")[::-1]
    bins, rest = fill_bins(order, np.array(lengths, dtype=np.int64)[order], rooms)
    left = sorted(lengths, reverse=True)
    for taken, room in itertools.zip_longest(bins, rooms, fillvalue=[]):
        expected = []
        while left and (fitting := [length for length in left if length <= room - sum(expected)]):
            expected.append(fitting[0])
            left.remove(fitting[0])
        assert [lengths[row] for row in taken] == expected
    assert [lengths[row] for row in rest] == left
