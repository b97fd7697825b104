"""The packer `balanced`: bins of similar cost, assigned to shards by cost.

Never uses more bins than first fit decreasing or its modified form. The cap on tokens is hard. O(n log n) and
deterministic.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, cycle
from typing import Any, ClassVar

import numpy as np

from rlframework.batch.packing.bounded_bins import balance_bins, initial_loads
from rlframework.batch.packing.cost import TokenCost, assign_by_cost, read_cost
from rlframework.batch.packing.first_fit import modified_first_fit
from rlframework.batch.packing.lengths import Ints, bin_sums, join_bins, read_lengths
from rlframework.batch.packing.packer import SequencePacker, check_shards
from rlframework.batch.packing.row_pool import RowPool, SortedRows
from rlframework.batch.packing.swaps import MOST_ROWS, improve_by_swaps


class BalancedPacker(SequencePacker):
    """Packs rows into bins of similar cost, never more bins than (modified) first fit decreasing with these arguments.

    `bin_count_multiple` is the number of bins that run in parallel, one per rank. The number of bins, rounded up to
    that multiple, is filled to equal cost as far as the cap allows. If one row costs more than the mean bin, the bins
    that run in parallel with it are filled up to its cost, and later bins to a lower cost. Rows of length 0
    are spread over all bins.
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

    def assign_to_shards(self, bins: Sequence[list[int]], sequence_lengths: Any, shards: int) -> list[list[list[int]]]:
        """Return the bins of each shard, `[shard][step]`: similar costs in each step, the costliest step first.

        The totals of the shards are similar too. `sequence_lengths` as for `pack`. Raises `BatchError` if the number of
        bins is not a multiple of `shards`.
        """
        count = check_shards(len(bins), shards)
        lengths = read_lengths(sequence_lengths, least=self.least_length)
        joined, counts = join_bins(bins, len(lengths))
        assigned = assign_by_cost(bin_sums(self.cost.of_rows(lengths[joined]), counts), count)
        return [[bins[number] for number in numbers] for numbers in assigned]

    def _pack(self, lengths: Ints) -> list[list[int]]:
        # First try the least number of bins any packing could have. Only if balancing fails there, let first fit decide
        # how many are needed, and balance that many; if that fails too, split the bins of first fit.
        rows = SortedRows(lengths, self.cost)
        wanted = self.bins_wanted(max(1, least_bins(rows, self._capacity)), len(lengths))
        bins = self._balance(rows, wanted)
        if bins is None:
            fitted = self._fit(rows, wanted)
            least, wanted = wanted, self.bins_wanted(len(fitted), len(lengths))
            bins = (self._balance(rows, wanted) if wanted > least else None) or split(fitted, wanted, rows)
        if 0 < len(rows) <= MOST_ROWS:
            loads = initial_loads(rows, len(bins), self._capacity, self.bin_count_multiple)
            bins = improve_by_swaps(rows, bins, loads, self._capacity)
        if rows.empty:
            bins += [[] for _ in range(wanted - len(bins))]
            spread_empty(bins, rows.empty)
        return bins

    def _balance(self, rows: SortedRows, count: int) -> list[list[int]] | None:
        if not len(rows):
            return []
        return balance_bins(rows, min(count, len(rows)), self._capacity, self.bin_count_multiple)

    def _fit(self, rows: SortedRows, wanted: int) -> list[list[int]]:
        """Pack by first fit decreasing, or by modified first fit decreasing if that needs fewer bins."""
        bins = RowPool(rows.indices, rows.lengths).first_fit(self._capacity)
        if len(bins) <= wanted:  # cannot be improved
            return bins
        other = modified_first_fit(rows.lengths, self._capacity)
        if len(other) >= len(bins):
            return bins
        indices = rows.indices.tolist()
        return [[indices[place] for place in sorted(places)] for places in other]


def least_bins(rows: SortedRows, capacity: int) -> int:
    """Return a lower bound on the number of bins of any packing.

    All tokens must fit, and at most `k` rows longer than `capacity / (k + 1)` fit into one bin.
    """
    bound = -(-rows.tokens // capacity)
    for k in (1, 2, 3, 4):
        if not len(rows) or rows.lengths[0] * (k + 1) <= capacity:
            continue
        bound = max(bound, -(-int(np.count_nonzero(rows.lengths * (k + 1) > capacity)) // k))
    return bound


def split(bins: list[list[int]], wanted: int, rows: SortedRows) -> list[list[int]]:
    """Halve the costliest of `bins` until there are `wanted` bins, or as many as rows."""
    wanted = min(wanted, len(rows))
    while len(bins) < wanted:  # each round halves up to all bins of two or more rows
        joined, counts = join_bins(bins, len(rows.lengths_by_index))
        costs = np.where(counts > 1, bin_sums(rows.cost.of_rows(rows.lengths_by_index[joined]), counts), -1.0)
        several = int(np.count_nonzero(counts > 1))
        for place in np.argsort(-costs, kind="stable")[: min(several, wanted - len(bins))].tolist():
            bins[place], other = halve(bins[place], rows)
            bins.append(other)
    return bins


def halve(indices: list[int], rows: SortedRows) -> tuple[list[int], list[int]]:
    """Split a bin of at least two rows into two of similar cost."""
    halves: tuple[list[int], list[int]] = ([], [])
    sums = [0.0, 0.0]
    for row, cost in zip(indices, rows.cost.of_rows(rows.lengths_by_index[indices]).tolist(), strict=True):
        lighter = int(sums[1] < sums[0])
        halves[lighter].append(row)
        sums[lighter] += cost
    return halves


def spread_empty(bins: list[list[int]], rows: list[int]) -> None:
    """Add rows of length 0: first one to each bin without rows, then the others to all bins in turn."""
    without_rows = [members for members in bins if not members]
    for row, members in zip(rows, chain(without_rows, cycle(bins)), strict=False):
        members.append(row)
