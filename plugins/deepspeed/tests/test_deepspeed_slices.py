"""Tensor-parallel partitions, and flat ranges of them, against plain indexing."""

from __future__ import annotations

import math

import pytest
import torch

from rlframework.engine import fill_weights, flat_shards
from rlframework_deepspeed.autotp import Partition, _parts


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


WIDTHS = [[[2, 2]], [[3, 2]], [[2, 2], [1, 1], [1, 1]], [[4, 0]]]


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("share", [1, 3])
def test_a_range_of_a_part_is_read_of_the_whole(widths, dim, share):
    """`share`: into how many ranges ZeRO deals the part of tensor parallelism out."""
    size = sum(map(sum, widths))
    shape = (size, 3) if dim == 0 else (3, size)
    whole, ranks = numbered(shape), len(widths[0])
    partitions = [Partition(shape, dim, _parts(widths), rank) for rank in range(ranks)]
    assert torch.equal(partitions[0].join([partition.of(whole) for partition in partitions]), whole)
    told = torch.full(shape, -1.0)
    for partition in partitions:
        part = partition.of(whole)
        row, length = part.reshape(-1).clone(), -(-part.numel() // share)
        for first in range(0, part.numel(), max(length, 1)):
            shard = row[first : first + length]
            for one in flat_shards("weight", shape, shard, first, tuple(part.shape), partition.regions):
                told[one.where] = one.local
            read = torch.empty_like(shard)
            fill_weights(
                flat_shards("weight", shape, read, first, tuple(part.shape), partition.regions), {"weight": whole}
            )
            assert torch.equal(read, shard)
    assert torch.equal(told, whole)
