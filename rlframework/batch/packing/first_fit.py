"""The established packers: concatenative, first fit decreasing, first fit shuffled, modified first fit decreasing.

All are O(n log n), and assign bins to shards round robin. The packer `balanced` is in `balanced.py`.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from heapq import heappush, heapreplace
from itertools import pairwise

import numpy as np

from rlframework.batch.packing.lengths import Ints, sort_descending
from rlframework.batch.packing.packer import SequencePacker


class RowPool:
    """Rows that are not in a bin yet; `rows [n]` must be in descending order of their `lengths [n]`, all above 0.

    Rows of equal length form a group; the groups are sorted by ascending length. So a bisection over the lengths finds
    the longest row that fits, and a group that runs empty is deleted from the two lists.
    """

    def __init__(self, rows: Ints, lengths: Ints) -> None:
        ascending = lengths[::-1]
        starts = np.flatnonzero(np.diff(ascending, prepend=0))
        listed = rows[::-1].tolist()
        self._lengths: list[int] = ascending[starts].tolist()
        self._groups = [listed[start:end] for start, end in pairwise([*starts.tolist(), len(listed)])]

    def __bool__(self) -> bool:
        return bool(self._lengths)

    def fill(self, taken: list[int], room: int) -> int:
        """Move the longest row that fits `room` to `taken`, again and again; return the room that is left."""
        # Runs once for each row (or run of rows of equal length) of a batch: it determines the speed of the packers.
        lengths, groups = self._lengths, self._groups
        at = bisect_right(lengths, room)
        while at:
            at -= 1
            length, group = lengths[at], groups[at]
            if room < length + length:
                taken.append(group.pop())
                room -= length
            else:
                run = group[: -(room // length) - 1 : -1]
                del group[-len(run) :]
                taken += run
                room -= length * len(run)
            if not group:
                del lengths[at], groups[at]
            at = bisect_right(lengths, room, 0, at)  # what is left has no room for this length, or none remains
        return room

    def take_shortest(self) -> tuple[int, int]:
        """Take a row of the least length; return it and its length."""
        row, length = self._groups[0].pop(), self._lengths[0]
        if not self._groups[0]:
            del self._lengths[0], self._groups[0]
        return row, length

    def rest(self) -> list[int]:
        """Return the remaining rows, by descending length."""
        return [row for group in reversed(self._groups) for row in reversed(group)]


class ConcatenativePacker(SequencePacker):
    """Rows in the given order; a row that does not fit the current bin opens a new one."""

    max_sequences_per_bin: int = -1
    """The most rows in a bin, unlimited if below 1. Set it on an instance or a subclass."""

    def _pack(self, lengths: Ints) -> list[list[int]]:
        most = self.max_sequences_per_bin if self.max_sequences_per_bin > 0 else len(lengths)
        bins: list[list[int]] = []
        room = count = 0
        for row, length in enumerate(lengths.tolist()):
            if length > room or count == most:
                bins.append([])
                room, count = self._capacity, 0
            bins[-1].append(row)
            room -= length
            count += 1
        return bins


class FirstFitDecreasingPacker(SequencePacker):
    """Rows by descending length, each into the first bin that has room; of equal lengths the later row first."""

    def _pack(self, lengths: Ints) -> list[list[int]]:
        return first_fit_decreasing(sort_descending(lengths), lengths, self._capacity)


def first_fit_decreasing(rows: Ints, lengths: Ints, capacity: int) -> list[list[int]]:
    """Pack `rows`, by descending length, each into the first bin that has room; `lengths` are those of all rows.

    Works bin by bin instead of row by row. That gives the same bins: whether a row goes into the first bin depends only
    on longer rows, so the first bin is what a greedy scan over all rows collects, the second what a scan over the rows
    that are then left collects, and so on.
    """
    pool = RowPool(rows, lengths[rows])
    bins: list[list[int]] = []
    while pool:
        bins.append([])
        pool.fill(bins[-1], capacity)
    return bins


class FirstFitShufflePacker(SequencePacker):
    """Rows in random order, each into the first bin that has room.

    The order is drawn from Python's global generator. With a `seed`, each call of `pack` uses a new generator with that
    seed, so that equal lengths give equal bins.
    """

    def _pack(self, lengths: Ints) -> list[list[int]]:
        rows = list(range(len(lengths)))
        (random if self.seed is None else random.Random(self.seed)).shuffle(rows)
        return sort_within_bins(first_fit(rows, lengths[rows].tolist(), self._capacity), lengths)


def first_fit(rows: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    """Put each of `rows`, with its length in `lengths`, into the first bin that has room, or into a new one.

    A tournament tree over the room of all bins, including those not opened yet, finds that bin in O(log bins): each
    node has the greatest room below it, and the search goes left wherever that is enough.
    """
    most = min(len(rows), 2 * sum(lengths) // capacity + 1)  # any two consecutive bins hold more than one capacity
    leaves = 1 << (most - 1).bit_length()
    room = [capacity] * (2 * leaves)  # room[i] is the greater of room[2 * i] and room[2 * i + 1]
    bins: list[list[int]] = []
    for row, length in zip(rows, lengths, strict=True):
        node = 1
        while node < leaves:
            node += node
            if room[node] < length:
                node += 1
        if node - leaves == len(bins):
            bins.append([])
        bins[node - leaves].append(row)
        room[node] -= length
        while node > 1:
            node >>= 1
            best = max(room[2 * node], room[2 * node + 1])
            if room[node] == best:
                break
            room[node] = best
    return bins


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """Modified first fit decreasing (Johnson and Garey, 1985): at most 71/60 of the optimal number of bins, plus 1."""

    def _pack(self, lengths: Ints) -> list[list[int]]:
        return modified_first_fit(sort_descending(lengths), lengths, self._capacity)


def modified_first_fit(rows: Ints, lengths: Ints, capacity: int) -> list[list[int]]:
    """Pack `rows`, by descending length, with bins of capacity C as follows; `lengths` are those of all rows.

    1. Each row above C/2 opens a bin.
    2. In the order of these rows, longest first, each bin takes the longest row above C/3 that fits.
    3. In reverse order, each bin without such a row takes the shortest row above C/6 and the longest one up to C/3 that
       fits beside it.
    4. In order again, each bin takes the longest rows that still fit.
    5. The remaining rows go into further bins, longest first, each into the emptiest bin.
    """
    ordered = lengths[rows]
    large, medium, small = (int(np.count_nonzero(ordered * parts > capacity)) for parts in (2, 3, 6))
    bins = [[row] for row in rows[:large].tolist()]
    rooms = (capacity - ordered[:large]).tolist()
    mediums, smalls = (RowPool(rows[a:b], ordered[a:b]) for a, b in ((large, medium), (medium, small)))
    for number, room in enumerate(rooms):  # below C/2, so that there is no room for a second medium row
        rooms[number] = mediums.fill(bins[number], room)
    unpaired = []
    for number in reversed(range(large)):
        if len(bins[number]) == 1 and smalls:
            shortest, length = smalls.take_shortest()
            room = smalls.fill(bins[number], rooms[number] - length)  # at most one row, as above
            if len(bins[number]) == 1:
                unpaired = [shortest]  # the bins that follow have even less room
                break
            bins[number].append(shortest)
            rooms[number] = room
    rest = np.array([*mediums.rest(), *unpaired, *smalls.rest(), *rows[small:].tolist()], dtype=np.int64)
    rest = rest[sort_descending(lengths[rest])]
    pool = RowPool(rest, lengths[rest])
    for taken, room in zip(bins, rooms, strict=True):
        pool.fill(taken, room)
    left = pool.rest()
    emptiest: list[tuple[int, int]] = []  # a heap of the further bins: their tokens and numbers
    for row, length in zip(left, lengths[left].tolist(), strict=True):
        if emptiest and emptiest[0][0] + length <= capacity:
            tokens, number = emptiest[0]
            bins[number].append(row)
            heapreplace(emptiest, (tokens + length, number))
        else:
            heappush(emptiest, (length, len(bins)))
            bins.append([row])
    return sort_within_bins(bins, lengths)


def sort_within_bins(bins: list[list[int]], lengths: Ints) -> list[list[int]]:
    """Sort the rows of each bin, in place, by descending length, of equal lengths the later row first."""
    keys = lengths.tolist()
    for rows in bins:
        rows.sort(reverse=True)
        rows.sort(key=keys.__getitem__, reverse=True)
    return bins
