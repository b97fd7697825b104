"""The packer `balanced`: bins of similar cost, never more than (modified) first fit decreasing needs. Deterministic."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise

import numpy as np

from rlframework.batch.packing.first_fit import fill_bins, first_fit_decreasing, modified_first_fit
from rlframework.batch.packing.lengths import Floats, Ints, sort_descending, spread_empty

KEPT_PER_BIN = 3
"""If the bins will be nearly full, this many of the shortest rows per bin are kept to fill them."""
MOST_STEPS = 32
"""With more steps than this, a single step that waits for one long row does not matter."""


def pack_balanced(
    lengths: Ints, capacity: int, row_costs: Floats, group: int, bins_wanted: Callable[[int, int], int]
) -> list[list[int]]:
    """Pack rows into bins of similar cost; `group` bins run in parallel in each step, one per rank.

    `lengths [n]` and `row_costs [n]` are those of the rows, or of groups of rows that stay together.

    The number of bins, `bins_wanted(needed, rows)`, is filled to equal cost as far as the cap allows. If one row costs
    more than the mean bin, the bins that run in parallel with it are filled up to its cost, and later bins to a lower
    cost. Rows of length 0 are spread over all bins.

    First tries the least number of bins that any packing could have. Only if balancing fails there, first fit decides
    how many are needed, and that many are balanced; if that fails too, the bins are those of first fit.
    """
    rows, empty = np.split(sort_descending(lengths), [np.count_nonzero(lengths)])
    ordered, costs = lengths[rows], row_costs[rows]

    def balanced(wanted: int) -> list[list[int]] | None:
        """Return `wanted` bins of similar cost, or one per row if there are fewer; None if that fails."""
        count = min(wanted, len(rows))
        if not count:
            return []
        tight = capacity - int(ordered.sum()) / count < int(ordered[-1])
        loads, none = initial_loads(costs, count, group), np.zeros(count)
        attempts = [(loads, tight)] * bool(loads.any()) + [(none, tight)] + [(none, True)] * (not tight)
        for load, nearly_full in attempts:
            filler = BinFiller(ordered, costs, load, capacity)
            if filler.place_all(nearly_full):
                return filler.bins(rows)
        return None

    wanted = bins_wanted(max(1, least_bins(ordered, capacity)), len(lengths))
    bins = balanced(wanted)
    if bins is None:
        bins, least = first_fit_decreasing(lengths, capacity), wanted
        if len(bins) > least:
            bins = min(bins, modified_first_fit(lengths, capacity), key=len)
        wanted = bins_wanted(len(bins), len(lengths))
        evened = balanced(wanted) if wanted > least else None
        bins, wanted = (bins, len(bins)) if evened is None else (evened, wanted)
    spread_empty(bins, wanted, empty)
    return bins


def least_bins(lengths: Ints, capacity: int) -> int:
    """Return a lower bound on the number of bins: at most `k` rows longer than `capacity / (k + 1)` fit into one."""
    long = (-(-int(np.count_nonzero(lengths > capacity // (k + 1))) // k) for k in (1, 2, 3, 4))
    return max(-(-int(lengths.sum()) // capacity), *long)


def initial_loads(costs: Floats, count: int, group: int) -> Floats:
    """Return costs `[count]` that the bins are assumed to have at the start, so that the sum of step times is least.

    `costs` are in descending order, and `group` bins run in parallel in each step. A step takes at least as long as its
    costliest row. If that row costs more than the mean bin, the other bins of its step can be filled up to the same
    cost without making the step longer, and each later step gets less work. So the bins of step `s` have a target cost
    `targets[s]` that falls from step to step. Balancing makes the sum of initial load and work equal in all bins;
    starting each bin at `max(targets) - targets[s]` therefore gives it work of about `targets[s]`.
    """
    steps, total = count // group, float(costs.sum())
    if group == 1 or count % group or not 2 <= steps <= MOST_STEPS or costs[0] * count <= total:
        return np.zeros(count)
    cumulative, left = np.cumsum(costs), total
    targets = np.zeros(steps)
    for step in range(steps):
        mean = left / (count - step * group)
        # The steps so far have taken `total - left`, the longest rows first: the next row is the longest that remains.
        first = int(np.searchsorted(cumulative, (total - left) * (1 + 1e-12), side="right"))
        if first >= len(costs) or costs[first] <= mean:
            targets[step:] = mean  # no row dominates any more: the remaining bins share the remaining cost equally
            break
        targets[step] = costs[first]
        left = max(0.0, left - group * float(costs[first]))
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

    def __init__(self, lengths: Ints, costs: Floats, load: Floats, capacity: int) -> None:
        self.lengths, self.costs, self.load = lengths, costs, load.copy()
        self.where = np.zeros(len(lengths), dtype=np.int64)
        self.room = np.full(len(load), capacity, dtype=np.int64)

    def place_all(self, nearly_full: bool) -> bool:
        """Place all rows; return False if a row does not fit, or a bin is left empty.

        Rounds leave a bit of room in every bin. If the bins will be `nearly_full`, the shortest rows therefore fill one
        bin after another instead, up to slightly above the level, so that what room is left is left in few bins.
        """
        count, left = len(self.load), np.arange(len(self.lengths))[::-1]
        # Alone in their bins at first: one row for each, or those that reach above the level of the lightest bin
        above = np.count_nonzero(self.costs > self.level(0) - self.load.min()) if self.load.any() else count
        first = min(int(above), count)
        self._put(np.arange(first)[None], np.argsort(self.load, kind="stable")[:first])
        left = left[: len(left) - first]
        level, kept = self.level(first), KEPT_PER_BIN * count
        if nearly_full and len(left) >= kept:
            left = self.fill(np.concatenate((left[:kept], self.place(left[kept:], level))), level)
        left = self.place(left, level)
        rise = float(self.costs[left[-1]]) if len(left) else 0.0
        while len(left):  # the level rises until the bins that still have room take the remaining rows
            if self.room.max() < self.lengths[left[-1]]:
                return False
            level += rise
            before, left = len(left), self.place(left, level)
            rise *= 2 if len(left) == before else 1
        return bool(np.bincount(self.where, minlength=count).all())

    def level(self, start: int) -> float:
        """Return the cost of all bins if the rows from `start` on, each token at one cost, were poured into them.

        A bin takes cost from its load up to where it is full. So what all bins take up to a level is a piecewise linear
        function of it, whose slope grows by one at each load and falls by one at each full bin: invert that.
        """
        cost, tokens = float(self.costs[start:].sum()), int(self.lengths[start:].sum())
        if not tokens:
            return 0.0
        points = np.concatenate((self.load, self.load + self.room * (cost / tokens)))
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
            gap = self.gaps(level, longest / float(self.costs[left[-1]]))
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

    def gaps(self, level: float, tokens_per_cost: float) -> Ints:
        """Return how many tokens each bin takes up to `level`, within its room."""
        return np.clip((level - self.load) * tokens_per_cost, 0, self.room).astype(np.int64)

    def fill(self, rows: Ints, level: float) -> Ints:
        """Fill one bin after another with the longest of `rows` that fit; return the rows that remain."""
        gaps = self.gaps(level, float(self.lengths[rows].sum()) / float(self.costs[rows].sum()))
        gaps = np.minimum(gaps + 2 * self.lengths[-1], self.room)
        bins = np.argsort(gaps, kind="stable")
        taken, left = fill_bins(rows[::-1], self.lengths[rows[::-1]], gaps[bins].tolist())
        rows = np.fromiter(chain.from_iterable(taken), dtype=np.int64)
        self.where[rows] = where = np.repeat(bins[: len(taken)], list(map(len, taken)))
        np.add.at(self.load, where, self.costs[rows])
        np.subtract.at(self.room, where, self.lengths[rows])
        return np.array(left[::-1], dtype=np.int64)

    def _put(self, rows: Ints, bins: Ints) -> None:
        """Place `rows [k, n]` in the distinct `bins [n]`, `k` in each."""
        self.where[rows] = bins
        self.load[bins] += self.costs[rows].sum(axis=0)
        self.room[bins] -= self.lengths[rows].sum(axis=0)

    def bins(self, rows: Ints) -> list[list[int]]:
        """Return the members of each bin, in order of length; `rows [n]` are the numbers of the rows."""
        count = len(self.load)
        order = np.argsort(self.where.astype(np.uint16) if count <= 2**16 else self.where, kind="stable")
        ends = np.cumsum(np.bincount(self.where, minlength=count)).tolist()
        members = rows[order].tolist()
        return [members[start:end] for start, end in pairwise([0, *ends])]
