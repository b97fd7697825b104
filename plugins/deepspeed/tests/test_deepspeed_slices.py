"""Flat ranges of weights as slices, and tensor-parallel partitions, against plain indexing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlframework_deepspeed.autotp import _parts
from rlframework_deepspeed.slices import Partition, range_slices, views_with_slices

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


@st.composite
def ranges(draw):
    shape = draw(SHAPES)
    first = draw(st.integers(0, math.prod(shape)))
    return shape, first, draw(st.integers(first, math.prod(shape)))


@pytest.mark.slow
@given(ranges())
def test_range_slices_cover_the_range(case):
    shape, first, end = case
    whole, found = numbered(shape), []
    for where, begin, stop in range_slices(shape, first, end):
        assert whole[where].numel() == stop - begin
        found += whole[where].reshape(-1).tolist()
    assert found == list(range(first, end))
    assert len(list(range_slices(shape, first, end))) <= max(1, 2 * len(shape) - 1)


@pytest.mark.slow
@given(ranges())
def test_a_range_is_read_of_the_whole(case):
    shape, first, end = case
    row = torch.full((end - first,), -1.0)
    for view, where in views_with_slices(row, shape, first, None):
        view.copy_(numbered(shape)[where])
    assert row.tolist() == list(range(first, end))


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
            for view, where in views_with_slices(shard, tuple(part.shape), first, partition):
                told[where] = view
            read = torch.empty_like(shard)
            for view, where in views_with_slices(read, tuple(part.shape), first, partition):
                view.copy_(whole[where])
            assert torch.equal(read, shard)
    assert torch.equal(told, whole)


def test_views_share_the_memory_of_the_row():
    row = torch.zeros(6)
    for view, _ in views_with_slices(row, (3, 4), 3, None):
        view += 1
    assert row.tolist() == [1.0] * 6
