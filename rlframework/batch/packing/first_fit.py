"""The established packers: concatenative, first fit decreasing, first fit shuffled, modified first fit decreasing.

All are O(n log n), and assign bins to shards round robin. The packer `balanced` is in `balanced.py`.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable
from heapq import heappop, heappush
from itertools import pairwise, repeat

import numpy as np

from rlframework.batch.packing.lengths import Ints, sort_descending
from rlframework.batch.packing.packer import SequencePacker


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


class FirstFitShufflePacker(SequencePacker):
    """Rows in random order, each into the first bin that has room.

    The order is drawn from Python's global generator. With a `seed`, each call of `pack` uses a new generator with that
    seed, so that equal lengths give equal bins.
    """

    def _pack(self, lengths: Ints) -> list[list[int]]:
        rows = list(range(len(lengths)))
        (random if self.seed is None else random.Random(self.seed)).shuffle(rows)
        return sort_within_bins(first_fit(rows, lengths[rows].tolist(), self._capacity), lengths)


class ModifiedFirstFitDecreasingPacker(SequencePacker):
    """Modified first fit decreasing (Johnson and Garey, 1985): at most 71/60 of the optimal number of bins, plus 1."""

    def _pack(self, lengths: Ints) -> list[list[int]]:
        return modified_first_fit(sort_descending(lengths), lengths, self._capacity)


def fill_bins(rows: Ints, lengths: Ints, rooms: Iterable[int]) -> tuple[list[list[int]], list[int]]:
    """Give each bin of `rooms` in turn the longest of `rows` that fits, again and again, until no row fits.

    `lengths [n]`, in descending order, are those of `rows [n]`. Returns the rows of each bin visited, and the rows that
    remain. Rows of equal length form a group, and the groups are sorted by ascending length: a bisection finds the
    longest row that fits, and an empty group is deleted.
    """
    starts = np.flatnonzero(np.diff(lengths[::-1], prepend=0))
    sizes, listed = lengths[::-1][starts].tolist(), rows[::-1].tolist()
    groups = [listed[start:end] for start, end in pairwise([*starts.tolist(), len(listed)])]
    bins: list[list[int]] = []
    for room in rooms:  # the loops below run once for each row (or run of equal rows): they take most of the time
        if not sizes:
            break
        bins.append(taken := [])
        at = bisect_right(sizes, room)
        while at:
            at -= 1
            size, group = sizes[at], groups[at]
            if room < size + size:
                taken.append(group.pop())
                room -= size
            else:
                run = group[: -(room // size) - 1 : -1]
                del group[-len(run) :]
                taken += run
                room -= size * len(run)
            if not group:
                del sizes[at], groups[at]
            at = bisect_right(sizes, room, 0, at)  # what is left has no room for this length, or none remains
    return bins, [row for group in reversed(groups) for row in reversed(group)]


def first_fit_decreasing(rows: Ints, lengths: Ints, capacity: int) -> list[list[int]]:
    """Pack `rows`, by descending length, each into the first bin that has room; `lengths` are those of all rows.

    Filling bin by bin gives the same bins as placing row by row: whether a row goes into the first bin depends only on
    longer rows, so the first bin is what a greedy scan over all rows collects, the second what a scan over the rest
    collects, and so on.
    """
    return fill_bins(rows, lengths[rows], repeat(capacity))[0]


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
    sizes = ordered.tolist()
    large, medium, small = (int(np.count_nonzero(ordered * parts > capacity)) for parts in (2, 3, 6))
    rooms = [capacity - size for size in sizes[:large]]  # ascending
    taken: list[list[int]] = [[number] for number in range(large)]  # positions in `rows`
    fitting: list[int] = []  # rows above C/3 that fit, the longest last
    shortest = medium
    for number, room in enumerate(rooms):
        while shortest > large and sizes[shortest - 1] <= room:
            shortest -= 1
            fitting.append(shortest)
        if fitting:
            taken[number].append(fitting.pop())
    first, end = (
        medium,
        small,
    )  # a row too long beside the shortest one is so for the next bins too: they have less room
    for number in reversed(range(large)):
        if len(taken[number]) == 1:
            while end - first > 1 and sizes[first] + sizes[end - 1] > rooms[number]:
                first += 1
            if end - first < 2:
                break
            taken[number] += [first, end - 1]
            first, end = first + 1, end - 1
    left = np.ones(len(rows), dtype=bool)
    left[[place for places in taken for place in places]] = False
    rooms = [capacity - sum(sizes[place] for place in places) for places in taken]
    bins = [rows[places].tolist() for places in taken]
    filled, remaining = fill_bins(rows[left], ordered[left], rooms)
    for members, more in zip(bins, filled, strict=False):
        members += more
    return sort_within_bins(bins + emptiest_first(remaining, lengths[remaining].tolist(), capacity), lengths)


def emptiest_first(rows: list[int], lengths: list[int], capacity: int) -> list[list[int]]:
    """Pack rows, by descending length, each into the emptiest bin, or into a new one if it does not fit there."""
    bins: list[list[int]] = []
    others: list[tuple[int, int]] = []  # a heap of the tokens and numbers of all bins but the emptiest
    at = 0
    while at < len(rows):
        if others and others[0][0] + lengths[at] <= capacity:
            tokens, number = heappop(others)
        else:
            tokens, number = 0, len(bins)
            bins.append([])
        start, next_tokens = at, others[0][0] if others else capacity
        while at < len(rows) and (at == start or tokens < next_tokens) and tokens + lengths[at] <= capacity:
            tokens += lengths[at]
            at += 1
        bins[number] += rows[start:at]
        heappush(others, (tokens, number))
    return bins


def sort_within_bins(bins: list[list[int]], lengths: Ints) -> list[list[int]]:
    """Sort the rows of each bin, in place, by descending length, of equal lengths the later row first."""
    keys = lengths.tolist()
    for rows in bins:
        rows.sort(reverse=True)
        rows.sort(key=keys.__getitem__, reverse=True)
    return bins
