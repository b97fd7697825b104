"""Map shards of a weight to slices of the whole: tensor-parallel partitions and flat ranges of them.

ZeRO shards weights into flat ranges, while files, checkpoints and other layouts address rectangular slices; this module
converts ranges to slices.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Slices = tuple[slice, ...]
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Partition:
    """A rank's partition of a weight of `shape`: ranges (first, end) along `dim`, concatenated.

    `parts`: the ranges of each rank, in order; `rank`: this rank.
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[Ranges, ...]
    rank: int

    @property
    def ranges(self) -> Ranges:
        """This rank's ranges."""
        return self.parts[self.rank]

    def of(self, whole: Tensor) -> Tensor:
        """This rank's partition of the whole weight; may share its memory."""
        found = [whole.narrow(self.dim, first, end - first) for first, end in self.ranges]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Join all ranks' shards into the whole weight; shards may be padded along `dim`."""
        whole = parts[0].new_empty(self.shape)
        for part, ranges in zip(parts, self.parts, strict=True):
            start = 0
            for first, end in ranges:
                whole.narrow(self.dim, first, end - first).copy_(part.narrow(self.dim, start, end - first))
                start += end - first
        return whole

    @property
    def most(self) -> int:
        """The size of the largest shard along `dim`."""
        return max(sum(end - first for first, end in ranges) for ranges in self.parts)


def range_slices(shape: tuple[int, ...], first: int, end: int) -> Iterator[tuple[Slices, int, int]]:
    """Split the flat range `first` to `end` of a tensor of `shape` into slices, each with its own flat range."""
    if first >= end:
        return
    if len(shape) <= 1:
        yield ((slice(first, end),) if shape else ()), first, end
        return
    row = math.prod(shape[1:])
    top, bottom = -(-first // row), end // row  # the first whole row, and the end of them
    if top > bottom:  # within one row
        yield from _within(shape, bottom, first, end)
        return
    yield from _within(shape, top - 1, first, top * row)
    if top < bottom:
        yield (slice(top, bottom), *(slice(0, size) for size in shape[1:])), top * row, bottom * row
    yield from _within(shape, bottom, bottom * row, end)


def _within(shape: tuple[int, ...], index: int, first: int, end: int) -> Iterator[tuple[Slices, int, int]]:
    start = index * math.prod(shape[1:])
    for where, begin, stop in range_slices(shape[1:], first - start, end - start):
        yield (slice(index, index + 1), *where), begin + start, stop + start


def slices_of_whole(where: Slices, partition: Partition | None) -> Iterator[tuple[Slices, Slices]]:
    """Map the slice `where` of this rank's partition to pairs of slices: within `where`, and in the whole weight."""
    inside = tuple(slice(0, one.stop - one.start) for one in where)
    if partition is None:
        yield inside, where
        return
    bounds = [0]
    for first, end in partition.ranges:
        bounds.append(bounds[-1] + end - first)
    dim, one = partition.dim, where[partition.dim]
    for (begin, stop), (first, _) in zip(pairwise(bounds), partition.ranges, strict=True):
        low, high = max(one.start, begin), min(one.stop, stop)
        if low < high:
            local = slice(low - one.start, high - one.start)
            there = slice(low - begin + first, high - begin + first)
            yield (*inside[:dim], local, *inside[dim + 1 :]), (*where[:dim], there, *where[dim + 1 :])


def views_with_slices(
    row: Tensor, shape: tuple[int, ...], first: int, partition: Partition | None
) -> Iterator[tuple[Tensor, Slices]]:
    """Yield views of `row`, this rank's partition (of `shape`) from `first` on, with slices of the whole weight."""
    for where, begin, stop in range_slices(shape, first, first + row.numel()):
        size = tuple(one.stop - one.start for one in where)
        view = row[begin - first : stop - first].view(size)
        for inside, there in slices_of_whole(where, partition):
            yield view[inside], there
