"""Rows sorted by length, and a pool that gives out the longest remaining row that fits."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from functools import cached_property
from itertools import repeat

import numpy as np

from rlframework.batch.packing.cost import TokenCost
from rlframework.batch.packing.lengths import Floats, Ints, sort_descending


class SortedRows:
    """The rows to pack: those with tokens, by descending length and with their costs, and separately the empty ones.

    `indices [n]` are the row indices in that order and `lengths [n]` their lengths; `empty` are the indices of rows of
    length 0. `lengths_by_index` are the lengths of all rows as they were given.
    """

    def __init__(self, lengths: Ints, cost: TokenCost) -> None:
        ordered = sort_descending(lengths)
        self.lengths_by_index = lengths
        self.indices = ordered[: np.count_nonzero(lengths)]
        self.empty: list[int] = ordered[len(self.indices) :].tolist()
        self.lengths = lengths[self.indices]
        self.cost = cost

    def __len__(self) -> int:
        return len(self.indices)

    @cached_property
    def costs(self) -> Floats:
        """The cost of each row, in the order of `indices`."""
        return self.cost.of_rows(self.lengths)

    @cached_property
    def tokens(self) -> int:
        """The total number of tokens."""
        return int(self.lengths.sum())

    @cached_property
    def granularity(self) -> int:
        """The greatest common divisor of all lengths: above 1 if rows are padded to a multiple."""
        divisor = int(np.gcd.reduce(self.lengths[:64]))
        return divisor if divisor == 1 else int(np.gcd.reduce(self.lengths))


class RowPool:
    """Rows that are not in a bin yet; `rows [n]` must be in descending order of their `lengths [n]`, all above 0.

    Rows of equal length form a class, numbered by ascending length. The longest row that fits a given room is in the
    greatest class whose length does not exceed it and that still has rows. A bisection over the lengths finds the
    greatest class that is short enough, empty or not; from there `_link` leads to the nearest class at or below it that
    has rows. `_link` is the parent array of a union-find structure: a class that runs empty is united with the one
    below it. Path compression makes a lookup practically constant, so taking all rows is O(n log n), regardless of
    the number of distinct lengths.
    """

    def __init__(self, rows: Ints, lengths: Ints) -> None:
        self.remaining = len(rows)
        self._indices = rows
        self._rows: list[int] = rows.tolist()
        ascending = lengths[::-1]
        changes = np.flatnonzero(ascending[1:] != ascending[:-1]) + 1
        edges = np.concatenate((np.zeros(1, dtype=np.int64), changes, np.full(min(1, len(rows)), len(rows))))
        # Class 0 is a sentinel of length 0 without rows: a lookup that ends there has found nothing that fits. The rows
        # of class j are _rows[_first[j]:_end[j]]; they are taken from the front, by advancing _first[j].
        places: list[int] = (len(rows) - edges).tolist()
        self._lengths: list[int] = [0, *ascending[edges[:-1]].tolist()]
        self._first: list[int] = [0, *places[1:]]
        self._end: list[int] = [0, *places[:-1]]
        self._link = list(range(len(self._lengths)))
        self._shortest = 1

    def first_fit(self, capacity: int) -> list[list[int]]:
        """Pack all rows into bins of `capacity`, at least the longest row, by first fit decreasing.

        Works bin by bin instead of row by row. That gives the same bins: whether a row goes into the first bin depends
        only on longer rows, so the first bin is what a greedy scan over all rows collects, the second what a scan over
        the rows that are then left collects, and so on.
        """
        bins: list[list[int]] = []

        def new_bins() -> Iterator[list[int]]:
            while True:
                bins.append([])
                yield bins[-1]

        return bins[: len(self.fill(repeat(capacity), repeat(capacity), new_bins()))]

    def fill(self, limits: Iterable[int], rooms: Iterable[int], bins: Iterable[list[int]]) -> list[int]:
        """Add to each bin in turn the longest rows that fit within its limit, until nothing more fits.

        Tokens of a limit that a bin could not use raise the limits of the bins after it, by at most the shortest row
        and never above their `rooms`. Stops when no rows remain. Returns the tokens added to each bin visited.
        """
        # The inner loop runs once for each row (or run of rows of equal length) that is taken, and determines the speed
        # of all packers. It therefore uses local variables, and `_find` and `take` are inlined.
        rows, lengths, first, end, link = self._rows, self._lengths, self._first, self._end, self._link
        shortest = lengths[1] if len(lengths) > 1 else 0
        used: list[int] = []
        remaining, unused = self.remaining, 0
        for limit, most, taken in zip(limits, rooms, bins, strict=False):
            if not remaining:
                break
            remaining += len(taken)  # and minus its length after filling, below: together, minus the rows added
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
                at = bisect_right(lengths, room, 0, root + 1) - 1  # room only shrinks: never above this class again
            remaining -= len(taken)
            used.append(before - room)
            unused += limit - before + room
        self.remaining = remaining
        return used

    def longest_up_to(self, room: int) -> int:
        """Return the length of the longest row that fits `room`; 0 if none does."""
        return self._lengths[self._find(bisect_right(self._lengths, room) - 1)]

    def shortest(self) -> int:
        """Return the length of the shortest row; 0 if none remains."""
        # Classes never gain rows, so the search resumes where the last one ended.
        while self._shortest < len(self._lengths) and self._first[self._shortest] == self._end[self._shortest]:
            self._shortest += 1
        return self._lengths[self._shortest] if self.remaining else 0

    def take(self, length: int) -> int:
        """Take the next row of this length, which must exist; return its index."""
        at = bisect_left(self._lengths, length)
        row = self._rows[self._first[at]]
        self._first[at] += 1
        if self._first[at] == self._end[at]:
            self._link[at] = at - 1
        self.remaining -= 1
        return row

    def rest(self) -> tuple[Ints, Ints]:
        """Return the remaining rows, by descending length, and their lengths."""
        if not self.remaining:
            return self._indices[:0], self._indices[:0]
        first = np.array(self._first[:0:-1], dtype=np.int64)
        counts = np.array(self._end[:0:-1], dtype=np.int64) - first
        places = np.arange(self.remaining) + np.repeat(first - np.cumsum(counts) + counts, counts)
        return self._indices[places], np.repeat(np.array(self._lengths[:0:-1], dtype=np.int64), counts)

    def _find(self, at: int) -> int:
        """Return the greatest class at or below `at` that has rows; 0 if there is none."""
        link = self._link
        root = at
        while link[root] != root:
            root = link[root]
        while link[at] != root:
            link[at], at = root, link[at]
        return root
