"""Shards in flat memory against plain indexing, and filling them from saved tensors."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from rlframework.policy.checkpoint.saved import FIRST, SECOND
from rlframework.policy.engine import Moments, TensorShard
from rlframework.policy.tensor_shards import fill_moments, fill_weights, flat_shards, range_blocks, steps_of

SHAPES = [(), (1,), (7,), (1, 5), (4, 3), (3, 4, 5), (2, 1, 3)]


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_flat_range_splits_into_few_blocks_in_order(shape):
    tensor = numbered(shape)
    for start, stop in itertools.combinations_with_replacement(range(tensor.numel() + 1), 2):
        blocks = list(range_blocks(shape, start, stop))
        assert len(blocks) <= max(1, 2 * len(shape) - 1)
        assert [number for block in blocks for number in tensor[block].reshape(-1).tolist()] == list(range(start, stop))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_flat_range_is_filled_from_the_whole_weight(shape):
    weight = numbered(shape)
    for start, stop in itertools.combinations_with_replacement(range(weight.numel() + 1), 2):
        flat = torch.full((stop - start,), -1.0)
        shards = list(flat_shards("w", shape, flat, start))
        fill_weights(shards, {"w": weight})
        assert flat.tolist() == list(range(start, stop))
        assert all(torch.equal(weight[shard.where], shard.local) for shard in shards)


def test_a_weight_that_is_regions_of_a_tensor_is_found_in_its_ranges():
    """The tensor has rows 2 and 3 of the weight, another row, and row 0."""
    regions = [
        ((slice(2, 4), slice(0, 3)), (slice(0, 2), slice(0, 3))),
        ((slice(0, 1), slice(0, 3)), (slice(3, 4), slice(0, 3))),
    ]
    weight, stored = numbered((4, 3)), torch.full((4, 3), -1.0)
    for start, stop in ((0, 5), (5, 12)):
        fill_weights(flat_shards("w", (4, 3), stored.view(-1)[start:stop], start, (4, 3), regions), {"w": weight})
    assert torch.equal(stored, torch.stack((weight[2], weight[3], torch.full((3,), -1.0), weight[0])))


def test_moments_are_filled_by_their_kind():
    saved = {"w": Moments(4, numbered((6,)), numbered((6,)) + 10), "v": Moments(7, torch.empty(0), torch.empty(0))}
    first, second = torch.zeros(2), torch.zeros(3)
    fill_moments([TensorShard(FIRST + "w", first, (1,), (6,)), TensorShard(SECOND + "w", second, (3,), (6,))], saved)
    assert (first.tolist(), second.tolist()) == ([1.0, 2.0], [13.0, 14.0, 15.0])
    assert steps_of(saved, ["w", "v"]) == 7
