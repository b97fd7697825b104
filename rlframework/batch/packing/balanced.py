"""The packer `balanced`: bins of similar cost, assigned to shards by cost.

Never uses more bins than first fit decreasing or its modified form. The cap on tokens is hard. O(n log n) and
deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace
from itertools import chain
from typing import ClassVar

import numpy as np

from rlframework.batch.packing.first_fit import RowPool, first_fit_decreasing, modified_first_fit
from rlframework.batch.packing.lengths import (
    Floats,
    Ints,
    Lengths,
    TokenCost,
    assign_by_cost,
    bin_sums,
    read_lengths,
    sort_descending,
    spread_empty,
)
from rlframework.batch.packing.packer import SequencePacker, check_shards

ROUND = 40
"""A round of `BinFiller.worst_fit` takes about as long as placing this many rows one by one."""
KEPT_PER_BIN = 2
"""If the bins will be nearly full, this many of the shortest rows per bin are kept to fill them."""
MOST_SWAPPED, MOST_SWAPS = 256, 32
"""The most rows of a batch that are swapped, and the most swaps: a try takes 20 us, and gains less with more rows."""
HOPELESS = 16
"""Balancing fails, with so many rows, if the shortest is longer than this many times the spare room of a mean bin."""


class BalancedPacker(SequencePacker):
    """Packs rows into bins of similar cost, never more bins than (modified) first fit decreasing with these arguments.

    `bin_count_multiple` is the number of bins that run in parallel, one per rank. The number of bins, rounded up to
    that multiple, is filled to equal cost as far as the cap allows. If one row costs more than the mean bin, the bins
    that run in parallel with it are filled up to its cost, and later bins to a lower cost. Rows of length 0
    are spread over all bins.
    """

    least_length: ClassVar[int] = 0

    def assign_to_shards(
        self, bins: Sequence[list[int]], sequence_lengths: Lengths, shards: int
    ) -> list[list[list[int]]]:
        """Return the bins of each shard, `[shard][step]`: similar costs in each step, the costliest step first.

        The totals of the shards are similar too. Raises `BatchError` if the number of bins is not a multiple of
        `shards`.
        """
        count = check_shards(len(bins), shards)
        costs = self.cost.of_rows(read_lengths(sequence_lengths, least=self.least_length))
        return [[bins[number] for number in numbers] for numbers in assign_by_cost(bin_sums(bins, costs), count)]

    def _pack(self, lengths: Ints) -> list[list[int]]:
        # First try the least number of bins any packing could have. Only if balancing fails there, let first fit decide
        # how many are needed, and balance that many; if that fails too, take the bins of first fit.
        order = sort_descending(lengths)
        rows, empty = np.split(order, [np.count_nonzero(lengths)])
        ordered = lengths[rows]
        least = wanted = self.bins_wanted(max(1, least_bins(ordered, self._capacity)), len(lengths))
        filler, bins = self._balanced(ordered, wanted), []
        if filler is None:
            bins = first_fit_decreasing(rows, lengths, self._capacity)
            if len(bins) > wanted:
                bins = min(bins, modified_first_fit(rows, lengths, self._capacity), key=len)
            wanted = self.bins_wanted(len(bins), len(lengths))
            self._add_bins(bins, min(wanted, len(rows)))
            filler = self._balanced(ordered, wanted) if wanted > least else None
        if filler is None and len(rows) <= MOST_SWAPPED:
            filler = self._filler(ordered, len(bins))
            place = {row: number for number, row in enumerate(rows.tolist())}
            filler.add([[place[row] for row in members] for members in bins])
        if filler is not None:
            if len(rows) <= MOST_SWAPPED:
                filler.swap()
            bins = group_by_bin(rows, filler.where, wanted)
        bins += [[] for _ in range(wanted - len(bins))]
        spread_empty(bins, empty.tolist())
        return bins

    def _filler(self, lengths: Ints, count: int) -> BinFiller:
        loads = initial_loads(lengths, self.cost, count, self._capacity, self.bin_count_multiple)
        return BinFiller(lengths, self.cost, loads, self._capacity)

    def _balanced(self, lengths: Ints, wanted: int) -> BinFiller | None:
        """Fill `wanted` bins, or one per row, to equal cost; None if that fails. `lengths` are in descending order."""
        filler = self._filler(lengths, min(wanted, len(lengths)))
        loads = filler.load.copy()
        if filler.place_all():
            return filler
        plain = BinFiller(lengths, self.cost, np.zeros(len(loads)), self._capacity)
        if not (loads.any() and plain.place_all()):
            return None
        plain.load += loads  # for the swaps
        return plain


def least_bins(lengths: Ints, capacity: int) -> int:
    """Return a lower bound on the number of bins of any packing of rows of `lengths`, all at most `capacity`.

    All tokens must fit, and at most `k` rows longer than `capacity / (k + 1)` fit into one bin.
    """
    long = (-(-int(np.count_nonzero(lengths > capacity // (k + 1))) // k) for k in (1, 2, 3, 4))
    return max(-(-int(lengths.sum()) // capacity), *long)


def initial_loads(lengths: Ints, cost: TokenCost, count: int, capacity: int, group: int) -> Floats:
    """Return costs `[count]` that the bins are assumed to have at the start, so that the sum of step times is least.

    `lengths` are sorted in descending order, and `group` bins run in parallel in each step. A step takes at least as
    long as its costliest row. If that row costs more than the mean bin, the other bins of its step can be filled up to
    the same cost without making the step longer, and each later step gets less work. So the bins of step `s` have a
    target cost `targets[s]` that falls from step to step. Balancing makes the sum of initial load and work equal in all
    bins; starting each bin at `max(targets) - targets[s]` therefore gives it work of about `targets[s]`.
    """
    steps, costs = count // group, cost.of_rows(lengths)
    total = left = float(costs.sum())
    if not len(costs) or group == 1 or count % group or steps < 2 or costs[0] * count <= total:
        return np.zeros(count)
    cumulative = np.cumsum(costs)
    # The cost of a bin filled to the cap without one of the longest rows
    most = capacity * float(costs[group:].sum()) / max(1.0, float(lengths[group:].sum()))
    targets = np.zeros(steps)
    for step in range(steps):
        mean = left / (count - step * group)
        # The steps so far have taken `total - left`, the longest rows first: the next row is the longest that remains.
        first = int(np.searchsorted(cumulative, (total - left) * (1 + 1e-12), side="right"))
        if first >= len(costs) or costs[first] <= mean:
            targets[step:] = mean  # no row dominates any more: the remaining bins share the remaining cost equally
            break
        targets[step] = max(mean, min(float(costs[first]), most))
        longest = np.zeros(group)
        longest[: len(costs) - first] = costs[first : first + group]
        left = max(0.0, left - float(np.maximum(longest, targets[step]).sum()))
    return np.repeat(targets.max() - targets, group)


class BinFiller:
    """Fills a given number of bins to equal cost, under a hard cap of `capacity` tokens.

    Rows go to the bins by descending length, each to the bin with the least cost so far that has room ("worst fit"):
    long rows first, because a bin that is short of cost can be corrected with short rows, but not with long ones.
    As worst fit leaves a bit of room in every bin, it cannot fill bins completely. So if they will be nearly full, the
    shortest rows fill one bin after another instead.

    `lengths [n]`, in descending order, and `costs [n]` are those of the rows, and `where [n]` is the bin of each.
    `load [bins]` is the cost of each bin, with an initial `load`, and `room [bins]` the tokens that it still takes.
    """

    def __init__(self, lengths: Ints, cost: TokenCost, load: Floats, capacity: int) -> None:
        self.lengths, self.costs = lengths, cost.of_rows(lengths)
        self.where = np.empty(len(lengths), dtype=np.int64)
        self.load = load.copy()
        self.room = np.full(len(load), capacity, dtype=np.int64)

    def place_all(self) -> bool:
        """Place all rows; return False if a row does not fit, or a bin is left empty."""
        rows, count = len(self.lengths), len(self.load)
        spare, shortest = int(self.room.sum() - self.lengths.sum()), int(self.lengths[-1]) if rows else 0
        if HOPELESS * spare < count * shortest:
            return False
        kept = KEPT_PER_BIN * count if spare < 2 * count * shortest and rows >= 2 * KEPT_PER_BIN * count else 0
        done = self.worst_fit(rows - kept)
        placed = self.place(self.fill(done) if kept else np.arange(done, rows))
        return placed and bool(np.bincount(self.where, minlength=count).all())

    def worst_fit(self, stop: int) -> int:
        """Place rows up to row `stop`, many at a time; return how many were placed.

        Works in rounds of vectorized operations. A round sorts the bins that have room by load and gives the k-th row
        to the k-th bin. That is what placing row by row would do until a bin that got a row in this round has less load
        than the next bin in order: the round is cut there, and the next one sorts again. Ends early if a round places
        too few rows to be worth its cost, or if a row fits no bin.
        """
        done, placed = 0, ROUND
        while done < stop and placed >= ROUND:
            able = np.flatnonzero(self.room >= self.lengths[done])  # its first row is the longest: the others fit too
            able = able[np.argsort(self.load[able], kind="stable")[: stop - done]]
            before = self.load[able]
            lowest_after = np.minimum.accumulate(before + self.costs[done : done + len(able)])
            overtaken = before[1:] > lowest_after[:-1]
            placed = int(overtaken.argmax()) + 1 if overtaken.any() else len(able)
            able, end = able[:placed], done + placed
            self.load[able] += self.costs[done:end]
            self.room[able] -= self.lengths[done:end]
            self.where[done:end] = able
            done = end
        return done

    def fill(self, start: int) -> Ints:
        """Fill the bins with the rows from `start` on, the fullest bin first; return the rows that remain."""
        pool = RowPool(np.arange(start, len(self.lengths)), self.lengths[start:])
        taken: list[list[int]] = [[] for _ in self.room]
        room = self.room.tolist()
        for number in np.argsort(self.room, kind="stable").tolist():
            pool.fill(taken[number], room[number])
        self.add(taken)
        return np.array(pool.rest(), dtype=np.int64)

    def add(self, bins: list[list[int]]) -> None:
        """Add rows to the bins, which have room for them."""
        count, rows = len(bins), np.array(list(chain.from_iterable(bins)), dtype=np.int64)
        self.where[rows] = np.repeat(np.arange(count), [len(members) for members in bins])
        self.load += np.bincount(self.where[rows], self.costs[rows], count)
        self.room -= np.bincount(self.where[rows], self.lengths[rows], count).astype(np.int64)

    def place(self, rows: Ints) -> bool:
        """Place `rows` one by one, each in the bin of least load that has room; return False if one fits no bin.

        A bin that is the lightest but lacks room for a row leaves the heap. Lengths descend, so it may have room for a
        later row; but its load says little about where rows fit, so it gets rows only once the heap is empty, the
        roomiest bin first.
        """
        load, room = self.load.tolist(), self.room.tolist()
        lightest = list(zip(load, range(len(load)), strict=True))
        heapify(lightest)
        lengths, costs = self.lengths[rows].tolist(), self.costs[rows].tolist()
        for row, length, cost in zip(rows.tolist(), lengths, costs, strict=True):
            while lightest and room[lightest[0][1]] < length:
                heappop(lightest)
            number = lightest[0][1] if lightest else room.index(max(room))
            if room[number] < length:
                return False
            room[number] -= length
            load[number] += cost
            if lightest:
                heapreplace(lightest, (load[number], number))
            self.where[row] = number
        self.load[:], self.room[:] = load, room
        return True

    def swap(self) -> None:
        """Swap or move rows, each time so that the costliest bin that can be improved gets cheaper (hill climbing).

        Placing rows in order of length never revisits a choice, and with few rows a single one can decide how long a
        step takes. All swaps of a bin are compared at once as a matrix. No bin is emptied.
        """
        rows, count, load, room = len(self.lengths), len(self.load), self.load, self.room
        # After the rows, one placeholder of length 0 for each bin: swapping a row for it moves the row.
        lengths, costs = (np.append(values, np.zeros(count, values.dtype)) for values in (self.lengths, self.costs))
        where = np.append(self.where, np.arange(count))
        stuck = np.zeros(count, dtype=bool)
        for _ in range(MOST_SWAPS if count > 1 else 0):
            top = int(np.where(stuck, -1.0, load).argmax())
            own, others = np.flatnonzero(where[:rows] == top), np.flatnonzero(where != top)
            if len(own) == 1:
                others = others[others < rows]  # a bin's only row may be swapped, but not moved
            cheaper = costs[own][:, None] - costs[others]
            after = np.maximum(load[top] - cheaper, load[where[others]] + cheaper)  # of the costlier of the two bins
            after[lengths[own][:, None] - lengths[others] > room[where[others]]] = np.inf
            best = int(after.argmin())
            if after.flat[best] >= load[top] * (1 - 1e-9):
                stuck[top] = True  # until a swap with another bin changes it
                continue
            given, taken = own[best // len(others)], others[best % len(others)]
            pair = [top, where[taken]]
            load[pair] += (costs[given] - costs[taken]) * np.array([-1, 1])
            room[pair] += (lengths[given] - lengths[taken]) * np.array([1, -1])
            stuck[pair] = False
            where[given] = pair[1]
            if taken < rows:
                where[taken] = top
        self.where = where[:rows]


def group_by_bin(rows: Ints, where: Ints, count: int) -> list[list[int]]:
    """Return `count` bins: row `rows[i]` goes to bin `where[i]`, in the given order within each bin."""
    order = np.argsort(where.astype(np.uint16) if count <= 2**16 else where, kind="stable")
    ends = np.cumsum(np.bincount(where, minlength=count)).tolist()
    listed = rows[order].tolist()
    return [listed[start:end] for start, end in zip([0, *ends], ends, strict=False)]
