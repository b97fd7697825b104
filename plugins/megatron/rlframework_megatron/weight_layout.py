"""How Megatron lays one weight into a local parameter: which part of the whole goes where, for a tensor-parallel rank.

Megatron fuses: the rows of `linear_qkv` are, key-value group by group, the group's query heads, its key and its value;
those of `linear_fc1` on each rank are its part of the gate, then its part of `up`. Tensor ranks share the rows of the
fused matrix in equal parts, of `linear_proj` and `linear_fc2` the columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from rlframework.errors import ConfigError

Where = tuple[slice, ...]
Region = tuple[Where, Where]
"""A box of the whole weight, and the box of the local parameter that holds it: both of one shape."""


@dataclass(frozen=True)
class Cut:
    """How a weight is laid out. By itself: on each rank whole."""

    split: bool = False
    """Whether ranks have different parts of it."""

    def regions(self, shape: tuple[int, ...], rank: int, size: int) -> Iterator[Region]:
        """Of the weight of `shape`, for tensor rank `rank` of `size`; none where nothing of it is there."""
        everything = tuple(slice(0, extent) for extent in shape)
        yield everything, everything


@dataclass(frozen=True)
class Vocabulary(Cut):
    """Rows in equal parts, of as many as `padded` says: the rest is padding, and no part of the weight."""

    split: bool = True
    padded: int = 0

    def regions(self, shape: tuple[int, ...], rank: int, size: int) -> Iterator[Region]:
        """See `Cut`."""
        share = _share(self.padded or shape[0], size)
        start, stop = (min(rank * share + end, shape[0]) for end in (0, share))
        if start < stop:
            yield _rows(start, 0, stop - start, shape)


@dataclass(frozen=True)
class Columns(Cut):
    """Columns in equal parts."""

    split: bool = True

    def regions(self, shape: tuple[int, ...], rank: int, size: int) -> Iterator[Region]:
        """See `Cut`."""
        share = _share(shape[1], size)
        rows = slice(0, shape[0])
        yield (rows, slice(rank * share, (rank + 1) * share)), (rows, slice(0, share))


@dataclass(frozen=True)
class Gated(Cut):
    """One of the two halves of `linear_fc1`: `half` 0 is the gate, 1 is `up`."""

    split: bool = True
    half: int = 0

    def regions(self, shape: tuple[int, ...], rank: int, size: int) -> Iterator[Region]:
        """See `Cut`."""
        share = _share(shape[0], size)
        yield _rows(rank * share, self.half * share, share, shape)


@dataclass(frozen=True)
class Grouped(Cut):
    """Queries, keys or values in `linear_qkv`: in each of `groups`, `rows` from row `start` of its `all_rows` on."""

    split: bool = True
    groups: int = 1
    start: int = 0
    rows: int = 1
    all_rows: int = 3

    def regions(self, shape: tuple[int, ...], rank: int, size: int) -> Iterator[Region]:
        """See `Cut`. With more ranks than groups, a rank has a part of a group."""
        share = _share(self.groups * self.all_rows, size)
        first, last = rank * share, (rank + 1) * share
        for group in range(self.groups):
            begin = group * self.all_rows + self.start
            start, stop = max(begin, first), min(begin + self.rows, last)
            if start < stop:
                yield _rows(group * self.rows + start - begin, start - first, stop - start, shape)


def _rows(start: int, local: int, count: int, shape: tuple[int, ...]) -> Region:
    """`count` rows that begin at `start` in the whole and at `local` here; other dimensions whole."""
    rest = tuple(slice(0, extent) for extent in shape[1:])
    return (slice(start, start + count), *rest), (slice(local, local + count), *rest)


def _share(extent: int, size: int) -> int:
    share, left = divmod(extent, size)
    if left:
        raise ConfigError(
            f"a dimension of {extent} does not divide over policy.parallelism.tensor={size}; choose a divisor of it"
        )
    return share


def extent(where: Where) -> int:
    """Elements of a box."""
    return math.prod(one.stop - one.start for one in where)


def inside(box: Where, outer: Where) -> Where:
    """Where `box` lies in what is cut out by `outer`, which has all of it."""
    return tuple(slice(a.start - b.start, a.stop - b.start) for a, b in zip(box, outer, strict=True))
