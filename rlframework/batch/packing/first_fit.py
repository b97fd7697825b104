"""The established packers: concatenative, first fit decreasing, first fit shuffled, modified first fit decreasing.

All are O(n log n), and assign bins to shards round robin. The packer `balanced` is in `balanced.py`.
"""

from __future__ import annotations

import heapq
import random
from bisect import bisect_left, bisect_right

import numpy as np

from rlframework.batch.packing.lengths import Ints, sort_descending
from rlframework.batch.packing.packer import SequencePacker, sort_within_bins
from rlframework.batch.packing.row_pool import RowPool


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
        rows = sort_descending(lengths)
        return RowPool(rows, lengths[rows]).first_fit(self._capacity)


class FirstFitShufflePacker(SequencePacker):
    """Rows in random order, each into the first bin that has room.

    The order is drawn from Python's global generator. With a `seed`, each call of `pack` uses a new generator with that
    seed, so that equal lengths give equal bins.
    """

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        seed: int | None = None,
    ) -> None:
        super().__init__(bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)
        self.seed = seed

    def _pack(self, lengths: Ints) -> list[list[int]]:
        rows = list(range(len(lengths)))
        if self.seed is None:
            random.shuffle(rows)
        else:
            random.Random(self.seed).shuffle(rows)
        return first_fit(rows, lengths[rows].tolist(), self._capacity)

    def _finish(self, bins: list[list[int]], lengths: Ints) -> None:
        sort_within_bins(bins, lengths)


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
    """Modified first fit decreasing (Johnson and Garey, 1985): at most 71/60 of the optimal number of bins, plus 1.

    With bins of capacity C:

    1. Each row above C/2 opens a bin.
    2. In the order of these rows, longest first, each bin takes the longest row above C/3 that fits.
    3. In reverse order, each bin without such a row takes the shortest row above C/6 and the longest one that fits
       beside it.
    4. In order again, each bin takes the longest rows that still fit.
    5. The remaining rows go into further bins, longest first, each into the emptiest bin.
    """

    def _pack(self, lengths: Ints) -> list[list[int]]:
        return modified_first_fit(lengths, self._capacity)

    def _finish(self, bins: list[list[int]], lengths: Ints) -> None:
        sort_within_bins(bins, lengths)


def modified_first_fit(lengths: Ints, capacity: int) -> list[list[int]]:
    """Pack rows of `lengths`, all in 1..capacity: see `ModifiedFirstFitDecreasingPacker`."""
    rows = sort_descending(lengths)
    ordered = lengths[rows]
    large, medium, small = (int(np.count_nonzero(ordered * parts > capacity)) for parts in (2, 3, 6))
    bins = [[row] for row in rows[:large].tolist()]
    rooms = (capacity - ordered[:large]).tolist()
    mediums, smalls = (RowPool(rows[a:b], ordered[a:b]) for a, b in ((large, medium), (medium, small)))
    _add_mediums(bins, rooms, mediums)
    unpaired = _add_pairs(bins, rooms, smalls)
    rest = np.concatenate((mediums.rest()[0], np.array(unpaired, dtype=np.int64), smalls.rest()[0], rows[small:]))
    rest = rest[sort_descending(lengths[rest])]
    pool = RowPool(rest, lengths[rest])
    pool.fill(rooms, rooms, bins)
    return bins + _emptiest_first(*pool.rest(), capacity)


def _add_mediums(bins: list[list[int]], rooms: list[int], mediums: RowPool) -> None:
    for number, room in enumerate(rooms):
        length = mediums.longest_up_to(room)
        if length:
            bins[number].append(mediums.take(length))
            rooms[number] -= length


def _add_pairs(bins: list[list[int]], rooms: list[int], smalls: RowPool) -> list[int]:
    """Add two small rows to each bin of one row, the roomiest first; return a row that found no partner."""
    for number in reversed(range(len(bins))):
        if len(bins[number]) > 1:
            continue
        shortest = smalls.shortest()
        if smalls.remaining < 2 or rooms[number] < 2 * shortest:
            break
        first = smalls.take(shortest)
        length = smalls.longest_up_to(rooms[number] - shortest)
        if not length:
            return [first]  # the bins that follow have even less room
        bins[number] += [smalls.take(length), first]
        rooms[number] -= length + shortest
    return []


def _emptiest_first(rows: Ints, lengths: Ints, capacity: int) -> list[list[int]]:
    """Pack rows, by descending length, each into the emptiest bin, or into a new one if it does not fit there.

    One bin remains the emptiest for a run of rows, until it holds as much as the next; a bisection finds the run.
    """
    listed, sizes = rows.tolist(), lengths.tolist()
    before = [0, *np.cumsum(lengths).tolist()]  # before[i]: total tokens of the rows before row i
    bins: list[list[int]] = []
    filled: list[tuple[int, int]] = []
    start = 0
    while start < len(listed):
        total, number = 0, len(bins)
        if filled and filled[0][0] + sizes[start] <= capacity:
            total, number = heapq.heappop(filled)
        else:
            bins.append([])
        shift = before[start] - total
        stop = bisect_right(before, capacity + shift, start) - 1
        if filled:
            stop = min(stop, max(start + 1, bisect_left(before, filled[0][0] + shift, start)))
        bins[number] += listed[start:stop]
        heapq.heappush(filled, (before[stop] - shift, number))
        start = stop
    return bins
