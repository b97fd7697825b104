"""Assigning rows to microbatches: sequence packing, dynamic batching, and the assignment of both to shards.

Works on row lengths alone: `BatchedDataDict.shard_by_batch_size` moves the rows, the data processor joins their tokens.
"""

from __future__ import annotations

import difflib
import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch.batch_rows import read_count, round_up
from rlframework.batch.packing.balanced import pack_balanced
from rlframework.batch.packing.dynamic import balanced_microbatches as balanced_microbatches
from rlframework.batch.packing.dynamic import round_robin_microbatches as round_robin_microbatches
from rlframework.batch.packing.first_fit import concatenate, first_fit_decreasing, first_fit_shuffle, modified_first_fit
from rlframework.batch.packing.lengths import Floats, Ints, Lengths, assign_by_cost, bin_sums, read_lengths
from rlframework.batch.packing.lengths import GroupIds as GroupIds
from rlframework.batch.packing.lengths import RowGroups as RowGroups
from rlframework.batch.packing.lengths import TokenCost as TokenCost


class PackingAlgorithm(enum.Enum):
    """The algorithms for packing rows into bins, each of them O(n log n); see the functions of the same names."""

    CONCATENATIVE = "concatenative"
    FIRST_FIT_DECREASING = "first_fit_decreasing"
    FIRST_FIT_SHUFFLE = "first_fit_shuffle"
    MODIFIED_FIRST_FIT_DECREASING = "modified_first_fit_decreasing"
    BALANCED = "balanced"


@dataclass(frozen=True)
class PackingMetrics:
    """The result of one call of `pack`: the fractions of all room that are used and wasted, mean over fullest bin."""

    utilisation: float
    waste: float
    balance: float
    bins: int
    rows: int
    tokens: int


class SequencePacker:
    """Packs rows into bins of at most `bin_capacity` tokens, and assigns the bins to shards.

    `algorithm` is a `PackingAlgorithm` or its name in any case. There are at least `min_bin_count` bins, and their
    number is a multiple of `bin_count_multiple`, so that this many shards get the same number. With `collect_metrics`,
    `metrics` is a list of the `PackingMetrics` of each call; otherwise it is None. `cost` is the cost of a row, used by
    BALANCED. `seed` makes each call of FIRST_FIT_SHUFFLE use a generator with that seed (None: Python's global one).
    """

    max_sequences_per_bin: int = -1
    """The most rows in a bin of CONCATENATIVE, unlimited if below 1. Set it on an instance or a subclass."""

    def __init__(
        self,
        algorithm: PackingAlgorithm | str,
        bin_capacity: int,
        collect_metrics: bool = False,
        min_bin_count: int | None = None,
        bin_count_multiple: int | None = None,
        *,
        cost: TokenCost | None = None,
        seed: int | None = None,
    ) -> None:
        self.algorithm = _read_algorithm(algorithm)
        self._least = 0 if self.algorithm is PackingAlgorithm.BALANCED else 1  # tokens of a row
        self.bin_capacity = read_count(bin_capacity, "bin_capacity", 1)
        self._capacity = min(self.bin_capacity, 2**60)  # practically unlimited, and within int64
        self.min_bin_count = read_count(min_bin_count or 0, "min_bin_count", 0)
        multiple = 1 if bin_count_multiple is None else bin_count_multiple
        self.bin_count_multiple = read_count(multiple, "bin_count_multiple", 1)
        self.cost, self.seed = cost or TokenCost(), seed
        self.metrics: list[PackingMetrics] | None = [] if collect_metrics else None

    def pack(self, sequence_lengths: Lengths, group_ids: GroupIds | None = None) -> list[list[int]]:
        """Return bins of row indices: every row in exactly one bin, no bin empty, none over `bin_capacity` tokens.

        Rows within a bin are in order of descending length (concatenative: in the given order). Raises `BatchError` for
        a row longer than a bin, for length 0 except with BALANCED, and if there are fewer rows than bins.

        Rows with equal `group_ids [rows]` share a bin, where they follow each other in the given order; groups are
        then packed as rows are. Their number need not suffice for `bin_count_multiple`: with BALANCED, up to
        `bin_count_multiple - 1` bins may be empty.
        """
        lengths = read_lengths(sequence_lengths, self.bin_capacity, least=self._least, limit="bin_capacity")
        groups = RowGroups.of(group_ids, len(lengths))
        sizes, costs = groups.sums(lengths), groups.sums(self.cost.of_rows(lengths))
        groups.require(sizes, self.bin_capacity, "tokens", "bin_capacity")
        idle = np.zeros(0 if self._least else groups.idle(self.bin_count_multiple), dtype=np.int64)
        sizes, costs = np.append(sizes, idle), np.append(costs, idle)
        bins = self._pack(sizes, costs) if len(sizes) else []
        for _ in range(self._bins_wanted(len(bins), len(sizes)) - len(bins)):
            bins.append([max(bins, key=len).pop()])
        bins = groups.expand(bins)
        if bins and self.metrics is not None:
            tokens, fullest = int(lengths.sum()), int(bin_sums(bins, lengths).max())
            used = tokens / (len(bins) * self.bin_capacity)
            balance = tokens / (len(bins) * fullest) if fullest else 1.0
            self.metrics.append(PackingMetrics(used, 1.0 - used, balance, len(bins), len(lengths), tokens))
        return bins

    def assign_to_shards(
        self, bins: Sequence[list[int]], sequence_lengths: Lengths, shards: int
    ) -> list[list[list[int]]]:
        """Return the bins of each shard, `[shard][step]`; raise `BatchError` unless all get the same number.

        Shard `i` gets every `shards`-th bin from bin `i` on. With BALANCED, the bins of each step have similar costs,
        the costliest step is the first, and the totals of the shards are similar.
        """
        count = read_count(shards, "shards", 1)
        if len(bins) % count:
            raise BatchError(
                f"{len(bins)} bins do not divide evenly among {count} shards: pack with bin_count_multiple={count} or "
                "a multiple of it"
            )
        if self.algorithm is not PackingAlgorithm.BALANCED:
            return [list(bins[shard::count]) for shard in range(count)]
        costs = bin_sums(bins, self.cost.of_rows(read_lengths(sequence_lengths, least=self._least)))
        return [[bins[number] for number in numbers] for numbers in assign_by_cost(costs, count)]

    def _pack(self, lengths: Ints, costs: Floats) -> list[list[int]]:
        match self.algorithm:
            case PackingAlgorithm.CONCATENATIVE:
                return concatenate(lengths, self._capacity, self.max_sequences_per_bin)
            case PackingAlgorithm.FIRST_FIT_DECREASING:
                return first_fit_decreasing(lengths, self._capacity)
            case PackingAlgorithm.FIRST_FIT_SHUFFLE:
                return first_fit_shuffle(lengths, self._capacity, self.seed)
            case PackingAlgorithm.MODIFIED_FIRST_FIT_DECREASING:
                return modified_first_fit(lengths, self._capacity)
            case PackingAlgorithm.BALANCED:
                return pack_balanced(lengths, self._capacity, costs, self.bin_count_multiple, self._bins_wanted)

    def _bins_wanted(self, bins: int, rows: int) -> int:
        """Raise `bins` to `min_bin_count` and then to a multiple; raise `BatchError` if there are fewer rows."""
        wanted = round_up(max(bins, self.min_bin_count), self.bin_count_multiple)
        if rows < wanted:
            raise BatchError(
                f"Cannot create {wanted} bins with only {rows} sequences: they need {bins} bins, min_bin_count is "
                f"{self.min_bin_count} and bin_count_multiple {self.bin_count_multiple}; use more rows or lower these"
            )
        return wanted


get_packer = SequencePacker  # NeMo-RL's name for the constructor


def _read_algorithm(algorithm: PackingAlgorithm | str | Any) -> PackingAlgorithm:
    if isinstance(algorithm, PackingAlgorithm):
        return algorithm
    if not isinstance(algorithm, str):
        raise BatchTypeError(f"algorithm must be a PackingAlgorithm or its name, got a {type(algorithm).__name__}")
    names, name = PackingAlgorithm.__members__, algorithm.upper()
    if name in names:
        return names[name]
    hint = "".join(f" Did you mean {near!r}?" for near in difflib.get_close_matches(name, names, n=1))
    raise BatchError(f"unknown packing algorithm {algorithm!r}.{hint} Use one of {', '.join(names)}, in any case.")
