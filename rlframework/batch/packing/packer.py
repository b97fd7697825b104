"""The base class of all packers: checks input, adjusts the number of bins, assigns bins to shards, keeps metrics."""

from __future__ import annotations

import difflib
import enum
import heapq
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar

from rlframework.batch.packing.lengths import (
    Ints,
    Lengths,
    TokenCost,
    bin_sums,
    read_cost,
    read_count,
    read_lengths,
    round_up,
)
from rlframework.errors import BatchError, BatchTypeError


class PackingAlgorithm(enum.Enum):
    """The algorithms for packing rows into bins; `get_packer` constructs their packers."""

    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"
    BALANCED = "balanced"


def read_algorithm(algorithm: PackingAlgorithm | str | Any) -> PackingAlgorithm:
    """Return the algorithm of this name, in any case, or `algorithm` itself; raise `BatchError` listing the names."""
    if isinstance(algorithm, PackingAlgorithm):
        return algorithm
    if not isinstance(algorithm, str):
        raise BatchTypeError(f"algorithm must be a PackingAlgorithm or its name, got a {type(algorithm).__name__}")
    names = list(PackingAlgorithm.__members__)
    if algorithm.upper() in names:
        return PackingAlgorithm[algorithm.upper()]
    near = difflib.get_close_matches(algorithm.upper(), names, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise BatchError(f"unknown packing algorithm {algorithm!r}.{hint} Use one of {', '.join(names)}, in any case.")


@dataclass(frozen=True)
class PackingStats:
    """The result of one call of `pack` with at least one row.

    `utilisation` and `waste` are the fractions of the capacity of all bins that hold tokens and that are empty;
    `balance` is the tokens of the mean bin over those of the fullest: 1 if all are equal.
    """

    utilisation: float
    waste: float
    balance: float
    bins: int
    rows: int
    tokens: int


@dataclass
class Spread:
    """The minimum, maximum and mean of a value over the calls."""

    min: float
    max: float
    mean: float


class PackingMetrics:
    """Statistics of a packer since it was constructed or `reset`. Calls without rows do not count."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget all calls."""
        self.calls = 0
        self.last: PackingStats | None = None
        self._spreads: dict[str, Spread] = {}

    def add(self, bins: Sequence[Sequence[int]], lengths: Ints, capacity: int) -> None:
        """Count one call: `bins` of rows of `lengths`, each bin with a capacity of `capacity` tokens."""
        if not bins:
            return
        tokens, fullest = int(lengths.sum()), int(bin_sums(bins, lengths).max())
        used = tokens / (len(bins) * capacity)
        balance = tokens / (len(bins) * fullest) if fullest else 1.0
        self.last = PackingStats(used, 1.0 - used, balance, len(bins), len(lengths), tokens)
        self.calls += 1
        for name, value in asdict(self.last).items():
            spread = self._spreads.setdefault(name, Spread(value, value, value))
            spread.min, spread.max = min(spread.min, value), max(spread.max, value)
            spread.mean += (value - spread.mean) / self.calls

    def summary(self) -> dict[str, Spread]:
        """Return the `Spread` of each of the `PackingStats` over all calls; {} without any."""
        return {name: replace(spread) for name, spread in self._spreads.items()}


class SequencePacker(ABC):
    """Packs rows into bins of at most `bin_capacity` tokens, and assigns the bins to shards.

    There are at least `min_bin_count` bins, and their number is a multiple of `bin_count_multiple`, so that this many
    shards get the same number. With `collect_metrics`, `metrics` records how full the bins were; otherwise it is None.
    `cost` is the cost of a row, used by BALANCED; `seed` (None: Python's global generator) is used by
    FIRST_FIT_SHUFFLE.
    """

    least_length: ClassVar[int] = 1
    """The least length of a row that the packer accepts."""

    def __init__(
        self,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        *,
        cost: TokenCost | None = None,
        seed: int | None = None,
    ) -> None:
        self.bin_capacity = read_count(bin_capacity, "bin_capacity", 1)
        self._capacity = min(self.bin_capacity, 2**60)  # practically unlimited, and within int64
        self.min_bin_count = read_count(min_bin_count or 0, "min_bin_count", 0)
        multiple = 1 if bin_count_multiple is None else bin_count_multiple
        self.bin_count_multiple = read_count(multiple, "bin_count_multiple", 1)
        self.cost, self.seed = read_cost(cost), seed
        self.metrics = PackingMetrics() if collect_metrics else None

    def pack(self, sequence_lengths: Lengths) -> list[list[int]]:
        """Return bins of row indices: every row in exactly one bin, no bin empty, none over `bin_capacity` tokens.

        Rows within a bin are in order of descending length (concatenative: in the given order). Raises `BatchError` for
        a row longer than a bin, for a negative length, for length 0 except with balanced, and if there are fewer rows
        than bins.
        """
        lengths = read_lengths(sequence_lengths, self.bin_capacity, least=self.least_length, limit="bin_capacity")
        bins = self._pack(lengths) if len(lengths) else []
        self._add_bins(bins, self.bins_wanted(len(bins), len(lengths)))
        if self.metrics is not None:
            self.metrics.add(bins, lengths, self.bin_capacity)
        return bins

    def assign_to_shards(
        self, bins: Sequence[list[int]], sequence_lengths: Lengths, shards: int
    ) -> list[list[list[int]]]:
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

    @staticmethod
    def _add_bins(bins: list[list[int]], wanted: int) -> None:
        """Add bins of one row until there are `wanted`, each the last row of the first bin with the most rows."""
        fullest = [(-len(bin_), number) for number, bin_ in enumerate(bins)] if len(bins) < wanted else []
        heapq.heapify(fullest)
        while len(bins) < wanted:
            size, number = fullest[0]
            bins.append([bins[number].pop()])
            heapq.heapreplace(fullest, (size + 1, number))


def check_shards(bins: int, shards: Any) -> int:
    """Return `shards` as an int; raise `BatchError` unless `bins` is a multiple of it."""
    count = read_count(shards, "shards", 1)
    if bins % count:
        raise BatchError(
            f"{bins} bins do not divide evenly among {count} shards: pack with bin_count_multiple={count} or a "
            "multiple of it"
        )
    return count
