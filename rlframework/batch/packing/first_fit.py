"""The established packers; see `PackingAlgorithm`. Those that sort rows by length leave out rows of length 0."""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterable
from heapq import heappush, heappushpop
from itertools import pairwise, repeat

import numpy as np

from rlframework.batch.packing.lengths import Ints, sort_descending


def concatenate(lengths: Ints, capacity: int, most: int) -> list[list[int]]:
    """Pack rows in order, at most `most` rows in a bin (unlimited if below 1)."""
    bins: list[list[int]] = []
    room = 0
    for row, length in enumerate(lengths.tolist()):
        if length > room or 0 < most <= len(bins[-1]):
            bins.append([])
            room = capacity
        bins[-1].append(row)
        room -= length
    return bins


def first_fit_decreasing(lengths: Ints, capacity: int) -> list[list[int]]:
    """Pack rows by descending length, each into the first bin that has room.

    Filling bin by bin gives the same bins as placing row by row: whether a row goes into the first bin depends only on
    longer rows, so the first bin is what a greedy scan over all rows collects, the second what a scan over the rest
    collects, and so on.
    """
    rows = sort_descending(lengths)
    return fill_bins(rows, lengths[rows], repeat(capacity))[0]


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


def first_fit_shuffle(lengths: Ints, capacity: int, seed: int | None) -> list[list[int]]:
    """Pack rows in random order, each into the first bin that has room.

    A tournament tree over the room of all bins, including those not opened yet, finds that bin in O(log bins): each
    node has the greatest room below it, and the search goes left wherever that is enough.
    """
    rows = list(range(len(lengths)))
    (random if seed is None else random.Random(seed)).shuffle(rows)
    most = min(len(rows), 2 * int(lengths.sum()) // capacity + 1)  # any two consecutive bins hold more than a capacity
    leaves = 1 << (most - 1).bit_length()
    room = [capacity] * (2 * leaves)  # room[i] is the greater of room[2 * i] and room[2 * i + 1]
    bins: list[list[int]] = []
    for row, length in zip(rows, lengths[rows].tolist(), strict=True):
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
    place = np.argsort(sort_descending(lengths)).tolist()  # of each row in the order within bins
    return [sorted(members, key=place.__getitem__) for members in bins]


def modified_first_fit(lengths: Ints, capacity: int) -> list[list[int]]:
    """Pack rows into bins of capacity C as follows.

    1. Each row above C/2 opens a bin.
    2. In the order of these rows, longest first, each bin takes the longest row above C/3 that fits.
    3. In reverse order, each bin without such a row takes the shortest row above C/6 and the longest one up to C/3 that
       fits beside it.
    4. In order again, each bin takes the longest rows that still fit.
    5. The remaining rows go into further bins, longest first, each into the emptiest bin or, if too long, a new one.

    Pointers find the rows of steps 2 and 3, because the room of the bins is monotonic: a row that fits a bin of step 2
    fits all later ones, and one that is too long for a bin of step 3 is too long for all later ones.
    """
    rows = sort_descending(lengths)
    listed, sizes = rows.tolist(), lengths[rows].tolist()
    large, medium, small = (int(np.count_nonzero(lengths * parts > capacity)) for parts in (2, 3, 6))
    taken: list[list[int]] = [[number] for number in range(large)]  # positions in `rows`
    fitting: list[int] = []  # rows above C/3 that fit, the longest last
    shortest = medium
    for places in taken:
        while shortest > large and sizes[shortest - 1] + sizes[places[0]] <= capacity:
            shortest -= 1
            fitting.append(shortest)
        if fitting:
            places.append(fitting.pop())
    first, end = medium, small
    for places in reversed(taken):
        if len(places) == 1:
            while end - first > 1 and sizes[places[0]] + sizes[first] + sizes[end - 1] > capacity:
                first += 1
            if end - first < 2:
                break
            places += [first, end - 1]
            first, end = first + 1, end - 1
    left = np.delete(np.arange(len(rows)), [place for places in taken for place in places])
    rooms = [capacity - sum(sizes[place] for place in places) for places in taken]
    filled, remaining = fill_bins(left, lengths[rows[left]], rooms)
    for places, more in zip(taken, filled, strict=False):
        places += more
    others: list[tuple[int, int]] = []  # a heap of the tokens and numbers of all further bins but the emptiest
    tokens, number, limit = capacity, -1, 0  # of the emptiest, until it has more than `limit`: a full one at first
    for place in remaining:
        if tokens >= limit or tokens + sizes[place] > capacity:
            tokens, number = heappushpop(others, (tokens, number))
            if tokens + sizes[place] > capacity:
                heappush(others, (tokens, number))
                tokens, number = 0, len(taken)
                taken.append([])
            limit = others[0][0] if others else capacity
        taken[number].append(place)
        tokens += sizes[place]
    return [[listed[place] for place in sorted(places)] for places in taken]
