"""Ranges of weights as boxes, and parts of tensor parallelism, against plain indexing."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rlframework_deepspeed.autotp import _parts
from rlframework_deepspeed.slices import Cut, boxes, fill, pieces

SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple)


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.arange(math.prod(shape), dtype=torch.float32).view(shape)


@st.composite
def ranges(draw):
    shape = draw(SHAPES)
    first = draw(st.integers(0, math.prod(shape)))
    return shape, first, draw(st.integers(first, math.prod(shape)))


@given(ranges())
def test_boxes_are_the_range(case):
    shape, first, end = case
    whole, found = numbered(shape), []
    for where, begin, stop in boxes(shape, first, end):
        assert whole[where].numel() == stop - begin
        found += whole[where].reshape(-1).tolist()
    assert found == list(range(first, end))
    assert len(list(boxes(shape, first, end))) <= max(1, 2 * len(shape) - 1)


@given(ranges())
def test_a_range_is_read_of_the_whole(case):
    shape, first, end = case
    row = torch.full((end - first,), -1.0)
    fill(row, shape, first, None, lambda where: numbered(shape)[where])
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
    cuts = [Cut(shape, dim, _parts(widths), rank) for rank in range(ranks)]
    assert torch.equal(cuts[0].join([cut.of(whole) for cut in cuts]), whole)
    told = torch.full(shape, -1.0)
    for cut in cuts:
        part = cut.of(whole)
        row, length = part.reshape(-1).clone(), -(-part.numel() // share)
        for first in range(0, part.numel(), max(length, 1)):
            piece = row[first : first + length]
            for box, where in pieces(piece, tuple(part.shape), first, cut):
                told[where] = box
            read = torch.empty_like(piece)
            fill(read, tuple(part.shape), first, cut, lambda where: whole[where])
            assert torch.equal(read, piece)
    assert torch.equal(told, whole)


def test_pieces_share_the_memory_of_the_row():
    row = torch.zeros(6)
    for box, _ in pieces(row, (3, 4), 3, None):
        box += 1
    assert row.tolist() == [1.0] * 6
