"""How Megatron stores a weight in a tensor-parallel rank's parameter: which slice of the whole goes where.

Megatron fuses matrices: the rows of `linear_qkv` are, for each key-value group, its query heads, key and value; the
rows of `linear_fc1` on each rank are its shard of the gate followed by its shard of `up`. Tensor ranks split the rows
of fused matrices, and the columns of `linear_proj` and `linear_fc2`, equally.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlframework.base.errors import ConfigError

Slices = tuple[slice, ...]
Region = tuple[Slices, Slices]
"""Slices of the whole weight, and the slices of equal shape of the local parameter that stores them."""


@dataclass(frozen=True)
class WeightLayout:
    """The layout of a weight across tensor ranks. The base class replicates it."""

    split: bool = False
    """Whether ranks hold different shards."""

    def regions(self, shape: tuple[int, ...], rank: int, size: int) -> Iterator[Region]:
        """Yield the regions of a weight of `shape` on tensor rank `rank` of `size`; none if the rank holds nothing."""
        everything = tuple(slice(0, extent) for extent in shape)
        yield everything, everything


@dataclass(frozen=True)
class Vocabulary(WeightLayout):
    """Equal shards of `padded` rows; rows beyond the weight are padding."""

    split: bool = True
    padded: int = 0

    def regions(self, shape: tuple[int, ...], rank: int, size: int) -> Iterator[Region]:
        """See `WeightLayout.regions`."""
        share = _share(self.padded or shape[0], size)
        start, stop = (min(rank * share + end, shape[0]) for end in (0, share))
        if start < stop:
            yield _rows(start, 0, stop - start, shape)


@dataclass(frozen=True)
class Rows(WeightLayout):
    """Equal shards of the rows."""

    split: bool = True

    def regions(self, shape: tuple[int, ...], rank: int, size: int) -> Iterator[Region]:
        """See `WeightLayout.regions`."""
        share = _share(shape[0], size)
        yield _rows(rank * share, 0, share, shape)


@dataclass(frozen=True)
class Columns(WeightLayout):
    """Equal shards of the columns."""

    split: bool = True

    def regions(self, shape: tuple[int, ...], rank: int, size: int) -> Iterator[Region]:
        """See `WeightLayout.regions`."""
        share = _share(shape[1], size)
        rows = slice(0, shape[0])
        yield (rows, slice(rank * share, (rank + 1) * share)), (rows, slice(0, share))


@dataclass(frozen=True)
class Gated(WeightLayout):
    """One half of `linear_fc1`: `half` 0 is the gate, 1 is `up`."""

    split: bool = True
    half: int = 0

    def regions(self, shape: tuple[int, ...], rank: int, size: int) -> Iterator[Region]:
        """See `WeightLayout.regions`."""
        share = _share(shape[0], size)
        yield _rows(rank * share, self.half * share, share, shape)


@dataclass(frozen=True)
class Grouped(WeightLayout):
    """Queries, keys or values in `linear_qkv`: in each of `groups` of `all_rows`, the `rows` from `start` on."""

    split: bool = True
    groups: int = 1
    start: int = 0
    rows: int = 1
    all_rows: int = 3

    def regions(self, shape: tuple[int, ...], rank: int, size: int) -> Iterator[Region]:
        """See `WeightLayout.regions`. With more ranks than groups, ranks split a group."""
        share = _share(self.groups * self.all_rows, size)
        first, last = rank * share, (rank + 1) * share
        for group in range(self.groups):
            begin = group * self.all_rows + self.start
            start, stop = max(begin, first), min(begin + self.rows, last)
            if start < stop:
                yield _rows(group * self.rows + start - begin, start - first, stop - start, shape)


@dataclass(frozen=True)
class GatedPair(WeightLayout):
    """Gate and `up` as one matrix: all rows of the gate before those of `up`."""

    split: bool = True

    def regions(self, shape: tuple[int, ...], rank: int, size: int) -> Iterator[Region]:
        """See `WeightLayout.regions`."""
        rows = shape[0] // 2
        for half in (0, 1):
            yield from _from_row(half * rows, Gated(half=half).regions((rows, *shape[1:]), rank, size))


@dataclass(frozen=True)
class GroupedTriple(WeightLayout):
    """Queries, keys and values as one matrix: all queries, all keys, all values.

    `queries`: the rows of the queries of a group; `head`: those of its key, and of its value.
    """

    split: bool = True
    groups: int = 1
    queries: int = 1
    head: int = 1

    def regions(self, shape: tuple[int, ...], rank: int, size: int) -> Iterator[Region]:
        """See `WeightLayout.regions`."""
        first, start, all_rows = 0, 0, self.queries + 2 * self.head
        for rows in (self.queries, self.head, self.head):
            part = Grouped(groups=self.groups, start=start, rows=rows, all_rows=all_rows)
            yield from _from_row(first, part.regions((self.groups * rows, *shape[1:]), rank, size))
            first, start = first + self.groups * rows, start + rows


def _from_row(first: int, regions: Iterator[Region]) -> Iterator[Region]:
    """Shift `regions` of a matrix to one that has it from row `first` on."""
    for (rows, *rest), local in regions:
        yield (slice(rows.start + first, rows.stop + first), *rest), local


def _rows(start: int, local: int, count: int, shape: tuple[int, ...]) -> Region:
    """The region of `count` rows from `start` in the whole weight and from `local` in the parameter."""
    rest = tuple(slice(0, extent) for extent in shape[1:])
    return (slice(start, start + count), *rest), (slice(local, local + count), *rest)


def _share(extent: int, size: int) -> int:
    share, left = divmod(extent, size)
    if left:
        raise ConfigError(
            f"a dimension of {extent} is not divisible by policy.parallelism.tensor={size}; choose a divisor of it"
        )
    return share


def extent(where: Slices) -> int:
    """The number of elements in `where`."""
    return math.prod(one.stop - one.start for one in where)


def inside(block: Slices, outer: Slices) -> Slices:
    """The slices of `box` relative to `outer`, which contains it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(block, outer, strict=True))
