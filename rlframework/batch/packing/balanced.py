"""`balanced`, our own packer: no more bins than first fit decreasing in either form, of like cost, dealt by cost.

The cap on tokens is hard. Everything is O(n log n) and deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle
from typing import Any, ClassVar

import numpy as np

from rlframework.batch.packing.assignment import deal_by_cost
from rlframework.batch.packing.bounded_bins import level, step_levels
from rlframework.batch.packing.cost import TokenCost, read_cost
from rlframework.batch.packing.first_fit import modified_first_fit
from rlframework.batch.packing.lengths import Ints, bin_sums, join_bins, read_lengths
from rlframework.batch.packing.packer import SequencePacker, check_shards
from rlframework.batch.packing.row_pool import Stock
from rlframework.batch.packing.sorted_rows import Rows
from rlframework.batch.packing.swaps import MOST_ROWS, even_out


class BalancedPacker(SequencePacker):
    """Bins of like cost, never more of them than first fit decreasing or its modification need with these arguments.

    `bin_count_multiple` is how many bins run side by side (the ranks). The rounded-up number of bins is filled to like
    cost as far as the cap allows; where one row costs more than that, the other bins that run beside it are filled up
    to it, and the later ones less. Rows of length 0 take no room: they are spread over all bins.
    """

    least_length: ClassVar[int] = 0

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        cost: TokenCost | None = None,
    ) -> None:
        super().__init__(bin_capacity, collect_metrics, min_bin_count, bin_count_multiple)
        self.cost = read_cost(cost)

    def deal(self, bins: Sequence[list[int]], sequence_lengths: Any, shards: int) -> list[list[list[int]]]:
        """The bins of each shard, `[shard][step]`: bins of like cost at each step, costliest first, and like sums.

        `sequence_lengths` as for `pack`. `BatchError` when the number of bins is not a multiple of `shards`.
        """
        count = check_shards(len(bins), shards)
        lengths = read_lengths(sequence_lengths, least=self.least_length)
        joined, counts = join_bins(bins, len(lengths))
        dealt = deal_by_cost(bin_sums(self.cost.of_rows(lengths[joined]), counts), count)
        return [[bins[number] for number in numbers] for numbers in dealt]

    def _pack(self, lengths: Ints) -> list[list[int]]:
        rows = Rows(lengths, self.cost)
        wanted = self.bins_wanted(max(1, least_bins(rows, self._capacity)), len(lengths))
        bins = self._level(rows, wanted)
        if bins is None:
            fitted = self._fit(rows, wanted)
            least, wanted = wanted, self.bins_wanted(len(fitted), len(lengths))
            bins = (self._level(rows, wanted) if wanted > least else None) or split(fitted, wanted, rows)
        if 0 < len(rows) <= MOST_ROWS:
            levels = step_levels(rows, len(bins), self._capacity, self.bin_count_multiple)
            bins = even_out(rows, bins, levels, self._capacity)
        if rows.empty:
            bins += [[] for _ in range(wanted - len(bins))]
            spread_empty(bins, rows.empty)
        return bins

    def _level(self, rows: Rows, count: int) -> list[list[int]] | None:
        if not len(rows):
            return []
        return level(rows, min(count, len(rows)), self._capacity, self.bin_count_multiple)

    def _fit(self, rows: Rows, wanted: int) -> list[list[int]]:
        """As few bins as first fit decreasing or its modification need; that runs only if it could be better."""
        bins = Stock(rows.numbers, rows.lengths).first_fit(self._capacity)
        if len(bins) <= wanted:
            return bins
        other = modified_first_fit(rows.lengths, self._capacity)
        if len(other) >= len(bins):
            return bins
        numbers = rows.numbers.tolist()
        return [[numbers[place] for place in sorted(places)] for places in other]


def least_bins(rows: Rows, capacity: int) -> int:
    """A number of bins that no packing can go below.

    The tokens of all rows have to fit; and of rows longer than `capacity / (k + 1)` at most `k` fit into one bin.
    """
    bound = -(-rows.tokens // capacity)
    for k in (1, 2, 3, 4):
        if not len(rows) or rows.lengths[0] * (k + 1) <= capacity:
            continue
        bound = max(bound, -(-int(np.count_nonzero(rows.lengths * (k + 1) > capacity)) // k))
    return bound


def split(bins: list[list[int]], wanted: int, rows: Rows) -> list[list[int]]:
    """`bins`, the costliest of them halved until there are `wanted` or as many as there are rows."""
    wanted = min(wanted, len(rows))
    while len(bins) < wanted:  # at most doubles in a round
        joined, counts = join_bins(bins, len(rows.by_number))
        costs = np.where(counts > 1, bin_sums(rows.cost.of_rows(rows.by_number[joined]), counts), -1.0)
        several = int(np.count_nonzero(counts > 1))
        for place in np.argsort(-costs, kind="stable")[: min(several, wanted - len(bins))].tolist():
            bins[place], other = halve(bins[place], rows)
            bins.append(other)
    return bins


def halve(numbers: list[int], rows: Rows) -> tuple[list[int], list[int]]:
    """Two bins of like cost from one of two and more rows."""
    halves: tuple[list[int], list[int]] = ([], [])
    sums = [0.0, 0.0]
    for row, cost in zip(numbers, rows.cost.of_rows(rows.by_number[numbers]).tolist(), strict=True):
        lighter = int(sums[1] < sums[0])
        halves[lighter].append(row)
        sums[lighter] += cost
    return halves


def spread_empty(bins: list[list[int]], rows: list[int]) -> None:
    """Rows of length 0: one for each bin that has none yet, the others in turn to all."""
    hollow = [numbers for numbers in bins if not numbers]
    for row, numbers in zip(rows, chain(hollow, cycle(bins)), strict=False):
        numbers.append(row)
