"""Metrics of how well bins are filled, over calls of `pack`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rlframework.batch.packing.lengths import Ints, bin_sums, join_bins


@dataclass(frozen=True)
class PackingStats:
    """The result of one call of `pack` with at least one row."""

    rows: int
    bins: int
    tokens: int
    capacity: int
    fullest: int
    """Tokens of the fullest bin."""

    @property
    def utilisation(self) -> float:
        """The fraction of the capacity of all bins that holds tokens, 0 to 1."""
        return self.tokens / (self.bins * self.capacity)

    @property
    def waste(self) -> float:
        """The fraction of the capacity of all bins that is empty: `1 - utilisation`."""
        return 1.0 - self.utilisation

    @property
    def balance(self) -> float:
        """Tokens of the mean bin over those of the fullest: 1 if all are equal."""
        return self.tokens / (self.bins * self.fullest) if self.fullest else 1.0


@dataclass
class Spread:
    """The minimum, maximum and mean of a value over the calls."""

    min: float
    max: float
    mean: float


MEASURES = ("utilisation", "waste", "balance", "bins", "rows", "tokens")


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
        joined, counts = join_bins(bins, len(lengths))
        fullest = int(bin_sums(lengths[joined], counts).max())
        self.last = PackingStats(len(lengths), len(bins), int(lengths.sum()), capacity, fullest)
        self.calls += 1
        for name in MEASURES:
            self._count(name, float(getattr(self.last, name)))

    def _count(self, name: str, value: float) -> None:
        spread = self._spreads.setdefault(name, Spread(value, value, value))
        spread.min, spread.max = min(spread.min, value), max(spread.max, value)
        spread.mean += (value - spread.mean) / self.calls

    def summary(self) -> dict[str, Spread]:
        """Return the `Spread` of utilisation, waste, balance, bins, rows and tokens over all calls; {} without any."""
        return {name: replace(spread) for name, spread in self._spreads.items()}
