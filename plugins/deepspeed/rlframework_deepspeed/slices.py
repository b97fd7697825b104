"""Where a part of a weight lies in the whole: what tensor parallelism cuts out, and of that a range of neighbours.

ZeRO deals a weight out as ranges of it written in one row. Files, checkpoints and other layouts know boxes: so a range
is told as boxes here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

Where = tuple[slice, ...]


Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Cut:
    """What of a weight of `shape` a rank has: along `dim` some ranges (first, end) of it, one after the other.

    `parts` has those of each rank that the weight is cut over, in their order; this one is number `rank`.
    """

    shape: tuple[int, ...]
    dim: int
    parts: tuple[Ranges, ...]
    rank: int

    @property
    def ranges(self) -> Ranges:
        """This rank's."""
        return self.parts[self.rank]

    def of(self, whole: Tensor) -> Tensor:
        """This rank's part of the whole weight, whose memory it may share."""
        found = [whole.narrow(self.dim, first, end - first) for first, end in self.ranges]
        return found[0] if len(found) == 1 else torch.cat(found, self.dim)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole weight of the parts of all ranks; each may be longer than it should along `dim`."""
        whole = parts[0].new_empty(self.shape)
        for part, ranges in zip(parts, self.parts, strict=True):
            start = 0
            for first, end in ranges:
                whole.narrow(self.dim, first, end - first).copy_(part.narrow(self.dim, start, end - first))
                start += end - first
        return whole

    @property
    def most(self) -> int:
        """The size along `dim` of the largest part."""
        return max(sum(end - first for first, end in ranges) for ranges in self.parts)


def boxes(shape: tuple[int, ...], first: int, end: int) -> Iterator[tuple[Where, int, int]]:
    """The range `first` to `end` of a tensor of `shape` in one row, as boxes: where each is, and its own range."""
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


def _within(shape: tuple[int, ...], index: int, first: int, end: int) -> Iterator[tuple[Where, int, int]]:
    start = index * math.prod(shape[1:])
    for where, begin, stop in boxes(shape[1:], first - start, end - start):
        yield (slice(index, index + 1), *where), begin + start, stop + start


def placed(where: Where, cut: Cut | None) -> Iterator[tuple[Where, Where]]:
    """The box `where` of this rank's part as boxes of the whole weight: where in the part's box, where in the whole."""
    inside = tuple(slice(0, one.stop - one.start) for one in where)
    if cut is None:
        yield inside, where
        return
    bounds = [0]
    for first, end in cut.ranges:
        bounds.append(bounds[-1] + end - first)
    dim, one = cut.dim, where[cut.dim]
    for (begin, stop), (first, _) in zip(pairwise(bounds), cut.ranges, strict=True):
        low, high = max(one.start, begin), min(one.stop, stop)
        if low < high:
            local = slice(low - one.start, high - one.start)
            there = slice(low - begin + first, high - begin + first)
            yield (*inside[:dim], local, *inside[dim + 1 :]), (*where[:dim], there, *where[dim + 1 :])


def pieces(row: Tensor, shape: tuple[int, ...], first: int, cut: Cut | None) -> Iterator[tuple[Tensor, Where]]:
    """`row`, this rank's part (of `shape`) from `first` on, as boxes that share its memory.

    Where each lies is told of the whole weight.
    """
    for where, begin, stop in boxes(shape, first, first + row.numel()):
        size = tuple(one.stop - one.start for one in where)
        box = row[begin - first : stop - first].view(size)
        for inside, there in placed(where, cut):
            yield box[inside], there


def fill(row: Tensor, shape: tuple[int, ...], first: int, cut: Cut | None, read: Callable[[Where], Tensor]) -> None:
    """Write into `row`, which is as for `pieces`, what `read` gives of the whole weight."""
    for box, where in pieces(row, shape, first, cut):
        box.copy_(read(where))
