"""Packing of groups of rows: whole groups, within the limits, the same number of microbatches per shard."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packing import PackingAlgorithm, RowGroups, balanced_microbatches, get_packer

LIMIT, LONGEST, MOST_ROWS = 60, 15, 4


@st.composite
def grouped_rows(draw, least_groups: int = 1, shortest: int = 0) -> tuple[list[int], list[int]]:
    """Lengths and group ids of up to 12 groups of up to 4 rows, mixed; any of them fits into 60 tokens."""
    sizes = draw(st.lists(st.integers(1, MOST_ROWS), min_size=least_groups, max_size=12))
    names = draw(st.lists(st.integers(-(2**40), 2**40), min_size=len(sizes), max_size=len(sizes), unique=True))
    ids = draw(st.permutations([name for name, size in zip(names, sizes, strict=True) for _ in range(size)]))
    empty = draw(st.sets(st.sampled_from(names))) if shortest == 0 else set()
    return [0 if name in empty else draw(st.integers(1, LONGEST)) for name in ids], ids


def require_whole(bins: list[list[int]], ids: list[int]) -> None:
    """Each row is in one bin; each group is a run of one bin, in order."""
    assert sorted(row for rows in bins for row in rows) == list(range(len(ids)))
    runs = []
    for rows in bins:
        for place, row in enumerate(rows):
            if place == 0 or ids[row] != ids[rows[place - 1]]:
                runs.append([])
            runs[-1].append(row)
    assert sorted(runs) == sorted([row for row, other in enumerate(ids) if other == name] for name in set(ids))


def test_groups_are_in_the_order_of_their_first_rows():
    groups = RowGroups.of([7, -3, 7, 5, -3, 7], 6)
    assert groups.ids.tolist() == [7, -3, 5]
    assert groups.sizes.tolist() == [3, 2, 1]
    values = np.array([1, 20, 3, 400, 50, 6])
    assert groups.sums(values).tolist() == [10, 70, 400]
    assert groups.largest(values).tolist() == [6, 50, 400]
    assert groups.expand([[2, 0], [1], [3]]) == [[3, 0, 2, 5], [1, 4], []]
    assert [groups.idle(shards) for shards in (1, 2, 3, 4)] == [0, 1, 0, 0]
    assert RowGroups.of([], 0).expand([]) == []


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(rows=grouped_rows(), shards=st.integers(1, 4))
def test_balanced_packs_have_whole_groups(rows, shards):
    lengths, ids = rows
    packer = get_packer("balanced", LIMIT, min_bin_count=shards, bin_count_multiple=shards)
    if len(set(ids)) < shards:
        with pytest.raises(BatchError, match="Cannot create"):
            packer.pack(lengths, ids)
        return
    bins = packer.pack(lengths, torch.tensor(ids))
    require_whole(bins, ids)
    assert max(sum(lengths[row] for row in members) for members in bins) <= LIMIT
    assert len(bins) % shards == 0
    by_shard = packer.assign_to_shards(bins, lengths, shards)
    assert all(any(members for members in own) for own in by_shard)  # no rank without rows


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(rows=grouped_rows(shortest=1), algorithm=st.sampled_from(PackingAlgorithm))
def test_every_packer_keeps_groups(rows, algorithm):
    lengths, ids = rows
    bins = get_packer(algorithm, LIMIT, seed=1).pack(lengths, ids)
    require_whole(bins, ids)
    assert max(sum(lengths[row] for row in members) for members in bins) <= LIMIT


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(rows=grouped_rows(), shards=st.integers(1, 4), multiple=st.sampled_from([1, 5]))
def test_dynamic_microbatches_have_whole_groups(rows, shards, multiple):
    lengths, ids = rows
    if len(set(ids)) < shards:
        with pytest.raises(BatchError, match="groups of rows cannot fill"):
            balanced_microbatches(lengths, LIMIT, shards=shards, length_round=multiple, group_ids=ids)
        return
    by_shard = balanced_microbatches(lengths, LIMIT, shards=shards, length_round=multiple, group_ids=ids)
    require_whole([members for own in by_shard for members in own], ids)
    assert len({len(own) for own in by_shard}) == 1
    assert all(any(own) for own in by_shard)
    for own in by_shard:
        for members in own:
            counted = [lengths[row] for row in members if lengths[row]]  # the others are left out of the microbatch
            assert len(counted) * -(-max(counted, default=0) // multiple) * multiple <= LIMIT


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(per_shard=st.integers(1, 6), shards=st.integers(1, 3), data=st.data())
def test_groups_of_one_row_are_packed_as_rows(per_shard, shards, data):
    count = per_shard * shards
    lengths = data.draw(st.lists(st.integers(0, LIMIT), min_size=count, max_size=count))
    ids = data.draw(st.permutations(range(count)))
    packer = get_packer("balanced", LIMIT, min_bin_count=shards, bin_count_multiple=shards)
    assert packer.pack(lengths, ids) == packer.pack(lengths)
    options = {"shards": shards, "length_round": 4}
    assert balanced_microbatches(lengths, LIMIT, group_ids=ids, **options) == balanced_microbatches(
        lengths, LIMIT, **options
    )


def test_pairs_are_balanced_over_shards():
    """Pairs of 60, 40, 30 and 30 tokens in two microbatches: 90 and 70 are as close as they can be."""
    lengths, ids = [30, 30, 20, 20, 15, 15, 15, 15], [0, 0, 1, 1, 2, 2, 3, 3]
    packer = get_packer("balanced", 100, min_bin_count=2, bin_count_multiple=2)
    bins = packer.pack(lengths, ids)
    assert sorted(sum(lengths[row] for row in members) for members in bins) == [70, 90]


def test_a_group_over_the_limit_is_named():
    with pytest.raises(BatchError, match=r"group 12 has 3 rows, which need 11 tokens .* bin_capacity is 10"):
        get_packer("balanced", 10).pack([10, 5, 4, 2], [3, 12, 12, 12])
    with pytest.raises(BatchError, match=r"group 12 has 3 rows, which need 15 tokens .* max_tokens is 14"):
        balanced_microbatches([10, 5, 4, 2], 14, group_ids=[3, 12, 12, 12])


@pytest.mark.parametrize("ids", [[1, 2], [1.0, 2.0, 3.0], [[1], [2], [3]]])
def test_ids_must_be_one_integer_a_row(ids):
    with pytest.raises(BatchTypeError, match="one integer for each of the 3 rows"):
        get_packer("balanced", 10).pack([1, 2, 3], ids)


def test_round_robin_microbatches_take_no_groups():
    data = BatchedDataDict({"ids": torch.zeros(4, 3), "sizes": torch.tensor([3, 2, 1, 3]), "pair": torch.arange(4)})
    args = {
        "max_tokens_per_microbatch": 6,
        "sequence_length_round": 1,
        "input_key": "ids",
        "input_lengths_key": "sizes",
    }
    with pytest.raises(BatchError, match="group_ids_key needs the algorithm balanced"):
        data.shard_by_batch_size(2, dynamic_batching_args={**args, "group_ids_key": "pair"})
    with pytest.raises(BatchError, match="no 'pairs', the given group_ids_key"):
        data.shard_by_batch_size(2, dynamic_batching_args={**args, "group_ids_key": "pairs", "algorithm": "balanced"})
    with pytest.raises(BatchTypeError, match="'ids' must be a tensor of 4 integers"):
        data.shard_by_batch_size(2, dynamic_batching_args={**args, "group_ids_key": "ids", "algorithm": "balanced"})
