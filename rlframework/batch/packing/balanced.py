"""The packer `balanced`: bins of similar cost, assigned to shards by cost.

Never uses more bins than first fit decreasing or its modified form. The cap on tokens is hard. Deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import ClassVar

import numpy as np

from rlframework.batch.packing.first_fit import fill_bins, first_fit_decreasing, modified_first_fit
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

KEPT_PER_BIN = 3
"""If the bins will be nearly full, this many of the shortest rows per bin are kept to fill them."""
HOPELESS = 16
"""Balancing fails, with so many rows, if the shortest is longer than this many times the spare room of a mean bin."""
MOST_SWAPPED, MOST_SWAPS = 256, 32
"""The most rows of a batch that are swapped, and the most swaps: a try takes 20 us, and gains less with more rows."""
MOST_STEPS = 32
"""With more steps than this, a single step that waits for one long row does not matter."""


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
        rows, empty = np.split(sort_descending(lengths), [np.count_nonzero(lengths)])
        least = wanted = self.bins_wanted(max(1, least_bins(lengths[rows], self._capacity)), len(lengths))
        bins = self._balance(rows, lengths[rows], wanted)
        if bins is None:
            fitted = first_fit_decreasing(rows, lengths, self._capacity)
            if len(fitted) > wanted:
                fitted = min(fitted, modified_first_fit(rows, lengths, self._capacity), key=len)
            wanted = self.bins_wanted(len(fitted), len(lengths))
            bins = self._balance(rows, lengths[rows], wanted) if wanted > least else None
            if bins is None:
                bins = fitted
                self._add_bins(bins, min(wanted, len(rows)))
        bins += [[] for _ in range(wanted - len(bins))]
        spread_empty(bins, empty.tolist())
        return bins

    def _balance(self, rows: Ints, lengths: Ints, wanted: int) -> list[list[int]] | None:
        """Return `wanted` bins of similar cost, or one per row if there are fewer; None if that fails."""
        count = min(wanted, len(rows))
        if not count:
            return []
        shortest, spare = int(lengths[-1]), self._capacity - int(lengths.sum()) / count
        if HOPELESS * spare < shortest:
            return None
        loads, none = initial_loads(lengths, self.cost, count, self._capacity, self.bin_count_multiple), np.zeros(count)
        tight = spare < shortest
        attempts = [(loads, tight)] if loads.any() else []
        attempts += [(none, True)] if tight else [(none, False), (none, True)]
        for load, nearly_full in attempts:
            filler = BinFiller(lengths, self.cost, load, self._capacity)
            if filler.place_all(nearly_full):
                if len(rows) <= MOST_SWAPPED:
                    filler.load += loads - load
                    filler.swap()
                return group_by_bin(rows, filler.where, count)
        return None


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
    steps = count // group
    if group == 1 or count % group or not 2 <= steps <= MOST_STEPS:
        return np.zeros(count)
    costs = cost.of_rows(lengths)
    total = left = float(costs.sum())
    if costs[0] * count <= total:
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

    Rows are placed in rounds, the longest rows first, because a bin that is short of cost can be corrected with short
    rows, but not with long ones. No row lifts a bin above the level of cost at which all bins will be equal, so bins
    stop at different times, and the later, shorter rows even them out. Each round is a few vectorized operations.

    `lengths [n]`, in descending order, and `costs [n]` are those of the rows, and `where [n]` is the bin of each.
    `load [bins]` is the cost of each bin, with an initial `load`, and `room [bins]` the tokens that it still takes.
    The methods take rows as positions in `lengths`, by ascending length.
    """

    def __init__(self, lengths: Ints, cost: TokenCost, load: Floats, capacity: int) -> None:
        self.lengths, self.costs = lengths, cost.of_rows(lengths)
        self.where = np.zeros(len(lengths), dtype=np.int64)
        self.load = load.copy()
        self.room = np.full(len(load), capacity, dtype=np.int64)

    def place_all(self, nearly_full: bool) -> bool:
        """Place all rows; return False if a row does not fit, or a bin is left empty.

        Rounds leave a bit of room in every bin. If the bins will be `nearly_full`, the shortest rows therefore fill one
        bin after another instead.
        """
        count, left, level = len(self.load), np.arange(len(self.lengths))[::-1], np.inf
        if nearly_full and len(left) >= 2 * KEPT_PER_BIN * count:
            kept, others = left[: KEPT_PER_BIN * count], left[KEPT_PER_BIN * count :]
            left = self.fill(np.concatenate((kept, self.place(others, level))))
        else:  # one row for each bin, or the rows that alone reach above the level of the lightest bin
            above = np.count_nonzero(self.costs > self.level(left) - self.load.min()) if self.load.any() else count
            first = min(int(above), count)
            self._put(np.arange(first)[None], np.argsort(self.load, kind="stable")[:first])
            left = left[: len(left) - first]
            level = self.level(left)
        left = self.place(left, level)
        rise = float(self.costs[left[-1]]) if len(left) else 0.0
        while len(left):  # the level rises until the bins that still have room take the remaining rows
            if self.room.max() < self.lengths[left[-1]]:
                return False
            level += rise
            before, left = len(left), self.place(left, level)
            rise *= 2 if len(left) == before else 1
        return bool(np.bincount(self.where, minlength=count).all())

    def level(self, rows: Ints) -> float:
        """Return the cost of all bins if `rows`, each token at the same cost, were poured into them like water.

        A bin takes cost from its load up to where it is full. So what all bins take up to a level is a piecewise linear
        function of it, whose slope grows by one at each load and falls by one at each full bin: invert that.
        """
        if not len(rows):
            return 0.0
        cost = float(self.costs[rows].sum())
        points = np.concatenate((self.load, self.load + self.room * (cost / int(self.lengths[rows].sum()))))
        order = np.argsort(points, kind="stable")
        slopes = np.cumsum(np.where(order < len(self.load), 1.0, -1.0))
        taken = np.cumsum(slopes[:-1] * np.diff(points[order]))
        return float(np.interp(cost, np.append(0.0, taken), points[order]))

    def place(self, left: Ints, level: float) -> Ints:
        """Place rows of `left` that lift no bin above `level`, in rounds until none does; return the others.

        In a round, the bins are ordered by the length they can take, and each gets the longest row that fits and that
        no bin before it has got. While all rows are short compared with the gaps, this gives the longest row to the
        bin of least load ("worst fit"); later, each bin the row that fits best. With many rows per bin, a round deals
        several to each bin, back and forth over the bins, so that longer rows and shorter ones make up for each other.
        """
        while len(left):
            lengths = self.lengths[left]
            longest = int(lengths[-1])
            tokens = (level - self.load) * (longest / float(self.costs[left[-1]]))  # each at the cost of this row's
            gap: Ints = np.maximum(np.minimum(tokens, self.room), 0).astype(np.int64)
            order = sort_descending(gap)
            several = 4 * int(gap.sum()) // (5 * longest * len(gap))
            if several > 1:
                order = order[: np.count_nonzero(gap >= several * longest)]
                several = min(several, len(left) // len(order))
            if several > 1:
                rows = left[-several * len(order) :][::-1].reshape(several, -1)
                rows[1::2] = rows[1::2, ::-1].copy()
                left = left[: -rows.size]
            else:
                order = order[: len(left)]
                fitting = np.searchsorted(lengths, gap[order], side="right")
                turn = np.arange(len(order))
                places = np.minimum.accumulate(fitting + turn) - turn - 1
                places = places[places >= 0]
                if not len(places):
                    return left
                order, rows = order[: len(places)], left[places][None]
                others = np.ones(len(left), dtype=bool)
                others[places] = False
                left = left[others]
            self._put(rows, order)
        return left

    def fill(self, rows: Ints) -> Ints:
        """Fill the bins, the fullest first, up to the cap; return the rows that remain."""
        bins = np.argsort(self.room, kind="stable")
        taken, left = fill_bins(rows[::-1], self.lengths[rows[::-1]], self.room[bins].tolist())
        placed, count = np.array(list(chain.from_iterable(taken)), dtype=np.int64), len(bins)
        where = np.repeat(bins[: len(taken)], [len(members) for members in taken])
        self.where[placed] = where
        self.load += np.bincount(where, self.costs[placed], count)
        self.room -= np.bincount(where, self.lengths[placed], count).astype(np.int64)
        return np.array(left[::-1], dtype=np.int64)

    def _put(self, rows: Ints, bins: Ints) -> None:
        """Place `rows [k, n]` in `bins [n]`, `k` in each."""
        self.where[rows] = bins
        self.load[bins] += self.costs[rows].sum(axis=0)
        self.room[bins] -= self.lengths[rows].sum(axis=0)

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
