"""The base class of all packers: checks input, adjusts the number of bins, assigns bins to shards, keeps metrics."""

from __future__ import annotations

import enum
import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from rlframework.batch.packing.lengths import Ints, read_count, read_lengths, round_up
from rlframework.batch.packing.metrics import PackingMetrics
from rlframework.errors import BatchError


class PackingAlgorithm(enum.Enum):
    """The algorithms for packing rows into bins; `get_packer` constructs their packers."""

    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"
    BALANCED = "balanced"


class SequencePacker(ABC):
    """Packs rows into bins of at most `bin_capacity` tokens, and assigns the bins to shards.

    There are at least `min_bin_count` bins, and their number is a multiple of `bin_count_multiple`, so that this many
    shards get the same number. With `collect_metrics`, `metrics` records how full the bins were; otherwise it is None.
    """

    least_length: ClassVar[int] = 1
    """The least length of a row that the packer accepts."""

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
    ) -> None:
        self.bin_capacity = read_count(bin_capacity, "bin_capacity", 1)
        self._capacity = min(self.bin_capacity, 2**60)  # practically unlimited, and within int64
        self.min_bin_count = read_count(0 if min_bin_count is None else min_bin_count, "min_bin_count", 0)
        self.bin_count_multiple = read_count(
            1 if bin_count_multiple is None else bin_count_multiple, "bin_count_multiple", 1
        )
        self.metrics = PackingMetrics() if collect_metrics else None

    def pack(self, sequence_lengths: Sequence[int] | Any) -> list[list[int]]:
        """Return bins of row indices: every row in exactly one bin, no bin empty, none over `bin_capacity` tokens.

        `sequence_lengths` is a list, tuple, numpy array or 1-D tensor with one integer per row. Rows within a bin are
        in order of descending length (concatenative: in the given order). Raises `BatchError` for a row longer than a
        bin, for a negative length, for length 0 except with balanced, and if there are fewer rows than bins.
        """
        lengths = read_lengths(sequence_lengths, self.bin_capacity, least=self.least_length)
        bins = self._pack(lengths) if len(lengths) else []
        self._add_bins(bins, self.bins_wanted(len(bins), len(lengths)))
        self._finish(bins, lengths)
        if self.metrics is not None:
            self.metrics.add(bins, lengths, self.bin_capacity)
        return bins

    def assign_to_shards(self, bins: Sequence[list[int]], sequence_lengths: Any, shards: int) -> list[list[list[int]]]:
        """Return the bins of each shard, `[shard][step]`: shard `i` gets every `shards`-th bin from bin `i` on.

        Raises `BatchError` if the number of bins is not a multiple of `shards`.
        """
        check_shards(len(bins), shards)
        return [list(bins[shard::shards]) for shard in range(shards)]

    def bins_wanted(self, bins: int, rows: int) -> int:
        """Raise `bins` to `min_bin_count` and then to a multiple; raise `BatchError` if there are fewer rows."""
        wanted = round_up(max(bins, self.min_bin_count), self.bin_count_multiple)
        if rows < wanted:
            raise BatchError(
                f"Cannot create {wanted} bins with only {rows} sequences: they need {bins} bins, min_bin_count is "
                f"{self.min_bin_count} and bin_count_multiple {self.bin_count_multiple}; use more rows or lower these"
            )
        return wanted

    @abstractmethod
    def _pack(self, lengths: Ints) -> list[list[int]]:
        """Pack at least one row; every length is in `least_length..bin_capacity`."""

    def _finish(self, bins: list[list[int]], lengths: Ints) -> None:
        """Put the rows of each bin into their final order."""

    @staticmethod
    def _add_bins(bins: list[list[int]], wanted: int) -> None:
        """Add bins of one row until there are `wanted`, each the last row of the first bin with the most rows."""
        fullest = [(-len(bin_), number) for number, bin_ in enumerate(bins)] if len(bins) < wanted else []
        heapq.heapify(fullest)
        while len(bins) < wanted:
            size, number = fullest[0]
            bins.append([bins[number].pop()])
            heapq.heapreplace(fullest, (size + 1, number))


def sort_within_bins(bins: list[list[int]], lengths: Ints) -> None:
    """Sort the rows of each bin by descending length; of equal lengths the later row first."""
    keys = lengths.tolist()
    for rows in bins:
        rows.sort(reverse=True)
        rows.sort(key=keys.__getitem__, reverse=True)


def check_shards(bins: int, shards: Any) -> int:
    """Return `shards` as an int; raise `BatchError` unless `bins` is a multiple of it."""
    count = read_count(shards, "shards", 1)
    if bins % count:
        raise BatchError(
            f"{bins} bins do not divide evenly among {count} shards: pack with bin_count_multiple={count} or a "
            "multiple of it"
        )
    return count
