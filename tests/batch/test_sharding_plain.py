"""Plain and uneven shards, and the order of rows restored."""

from __future__ import annotations

import pytest
import torch
from probe_batches import make_batch, numbers

from rlframework.base.errors import BatchError
from rlframework.batch.batched_data_dict import SlicedDataDict

# --- sharding and reordering


def rows_of(shards):
    return [numbers(shard) for shard in shards]


def test_each_shard_gets_its_share_of_each_global_batch():
    assert rows_of(make_batch(8).shard_by_batch_size(2, batch_size=4)) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert rows_of(make_batch(8).shard_by_batch_size(2)) == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert rows_of(make_batch(4).shard_by_batch_size(2, batch_size=2)) == [[0, 2], [1, 3]]


def test_uneven_shards():
    assert rows_of(make_batch(5).shard_by_batch_size(4, allow_uneven_shards=True)) == [[0, 1], [2, 3], [4], []]
    empty = make_batch(1).shard_by_batch_size(3, allow_uneven_shards=True)[2]
    assert type(empty) is SlicedDataDict
    assert set(empty) == set(make_batch(1))
    assert empty["two"].shape == (0, 3)
    assert empty["text"] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"shards": 3}, r"Batch size \(8\) is not a multiple of shards \(3\)"),
        ({"shards": 2, "batch_size": 3}, r"Total batch size \(8\) is not a multiple of batch_size \(3\)"),
        ({"shards": 4, "batch_size": 2}, r"Batch size \(2\) is not a multiple of shards \(4\)"),
        (
            {"shards": 2, "batch_size": 4, "allow_uneven_shards": True},
            "batch_size must be None if allow_uneven_shards is True",
        ),
        ({"shards": 0}, "0 shards with batch size None: both must be at least 1"),
        ({"shards": 2, "batch_size": 0}, "2 shards with batch size 0"),
    ],
)
def test_bad_shards(arguments, message):
    with pytest.raises(BatchError, match=message) as caught:
        make_batch(8).shard_by_batch_size(**arguments)
    assert isinstance(caught.value, AssertionError)


def test_reorder_applies_the_inverse_permutation():
    batch = make_batch(3)
    assert batch.reorder_data([2, 0, 1]) is None
    assert numbers(batch) == [1, 2, 0]  # the row at position 0 has sort key 2


def test_reorder_is_stable_and_takes_tensors():
    batch = make_batch(4)
    batch.reorder_data(torch.tensor([1, 0, 1, 0]))
    assert numbers(batch) == [1, 3, 0, 2]


@pytest.mark.parametrize("indices", [[0, 1], [[0, 1, 2]], [0, 1, 2, 3]])
def test_reorder_needs_one_index_per_row(indices):
    with pytest.raises(BatchError, match="for a batch of 3 rows"):
        make_batch(3).reorder_data(indices)
