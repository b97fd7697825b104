"""Rows ordered by length, from which the longest that still fits is taken again and again.

Equal lengths form one class, which is a run of the descending order; `link` leads over classes that are used up to the
nearest one below (union-find with path compression). Taking a row is a bisection: n log n in all, whatever the lengths.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from itertools import repeat

import numpy as np

from rlframework.batch.packing.lengths import Ints


class Stock:
    """Rows that are not in a bin yet: `rows [n]` in descending order of their `lengths [n]`, all above 0."""

    def __init__(self, rows: Ints, lengths: Ints) -> None:
        self.left = len(rows)
        self._numbers = rows
        self._rows: list[int] = rows.tolist()
        ascending = lengths[::-1]
        cuts = np.flatnonzero(ascending[1:] != ascending[:-1]) + 1
        edges = np.concatenate((np.zeros(1, dtype=np.int64), cuts, np.full(min(1, self.left), self.left)))
        # Class 0 is a sentinel of length 0 without rows. Class j has the rows from first[j] to end[j].
        places: list[int] = (self.left - edges).tolist()
        self._lengths: list[int] = [0, *ascending[edges[:-1]].tolist()]
        self._first: list[int] = [0, *places[1:]]
        self._end: list[int] = [0, *places[:-1]]
        self._link = list(range(len(self._lengths)))
        self._lowest = 1

    def first_fit(self, capacity: int) -> list[list[int]]:
        """All rows in bins of `capacity`, which must be at least the longest row: first fit decreasing.

        Bin by bin instead of row by row: a bin gets from first fit exactly those rows, in descending order, that no
        earlier bin had room for.
        """
        bins: list[list[int]] = []

        def opened() -> Iterator[list[int]]:
            while True:
                bins.append([])
                yield bins[-1]

        return bins[: len(self.fill(repeat(capacity), repeat(capacity), opened()))]

    def fill(self, limits: Iterable[int], rooms: Iterable[int], bins: Iterable[list[int]]) -> list[int]:
        """Add to each bin in turn the longest rows that its limit takes, until nothing more fits.

        What a bin could not use is added to the limit of the next ones, as far as their room goes. Rows of one length
        go together. Ends when no rows are left; returns how many tokens each bin that was gone over got.
        """
        rows, lengths, first, end, link = self._rows, self._lengths, self._first, self._end, self._link
        shortest = lengths[1] if len(lengths) > 1 else 0
        used: list[int] = []
        left, unused = self.left, 0
        for limit, most, taken in zip(limits, rooms, bins, strict=False):
            if not left:
                break
            left += len(taken)
            room = limit + (unused if unused < shortest else shortest)
            if room > most:
                room = most
            before = room
            at = bisect_right(lengths, room) - 1
            while at:
                root = link[at]
                if root != at:
                    while link[root] != root:
                        root = link[root]
                    while link[at] != root:
                        link[at], at = root, link[at]
                    if not root:
                        break
                length, start = lengths[root], first[root]
                if room < length + length:
                    taken.append(rows[start])
                    start += 1
                    room -= length
                else:
                    stop = start + room // length
                    if stop > end[root]:
                        stop = end[root]
                    taken += rows[start:stop]
                    room -= (stop - start) * length
                    start = stop
                first[root] = start
                if start == end[root]:
                    link[root] = root - 1
                if room < shortest:
                    break
                at = bisect_right(lengths, room, 0, root + 1) - 1
            left -= len(taken)
            used.append(before - room)
            unused += limit - before + room
        self.left = left
        return used

    def longest_up_to(self, room: int) -> int:
        """Length of the longest row that fits `room`; 0 when there is none."""
        return self._lengths[self._class(bisect_right(self._lengths, room) - 1)]

    def shortest(self) -> int:
        """Length of the shortest row; 0 when there is none."""
        while self._lowest < len(self._lengths) and self._first[self._lowest] == self._end[self._lowest]:
            self._lowest += 1
        return self._lengths[self._lowest] if self.left else 0

    def take(self, length: int) -> int:
        """The next row of this length, which must be there."""
        at = bisect_left(self._lengths, length)
        row = self._rows[self._first[at]]
        self._first[at] += 1
        if self._first[at] == self._end[at]:
            self._link[at] = at - 1
        self.left -= 1
        return row

    def rest(self) -> tuple[Ints, Ints]:
        """The rows that were not taken, by descending length, and their lengths."""
        if not self.left:
            return self._numbers[:0], self._numbers[:0]
        first = np.array(self._first[:0:-1], dtype=np.int64)
        counts = np.array(self._end[:0:-1], dtype=np.int64) - first
        places = np.arange(self.left) + np.repeat(first - np.cumsum(counts) + counts, counts)
        return self._numbers[places], np.repeat(np.array(self._lengths[:0:-1], dtype=np.int64), counts)

    def _class(self, at: int) -> int:
        link = self._link
        root = at
        while link[root] != root:
            root = link[root]
        while link[at] != root:
            link[at], at = root, link[at]
        return root
