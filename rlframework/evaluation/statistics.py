"""Statistics of an evaluation: unbiased pass@k, and confidence intervals.

Intervals treat the prompts as the random sample: Wilson's (1927) for the proportion of prompts, a percentile bootstrap
with a fixed seed for any other mean. They do not cover the variation between seeds of sampling or of training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import comb
from statistics import NormalDist

import numpy as np

LEVEL = 0.95
"""Confidence level of the intervals."""

RESAMPLES = 10_000
_SEED = 2107
_BLOCK = 4_000_000
"""Random numbers per block: 32 MB."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its interval at `LEVEL`, by `wilson` or `bootstrap`.

    The interval is None for non-finite values, and for equal ones unless the mean is a proportion.
    """

    value: float
    low: float | None
    high: float | None
    method: str | None


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """The probability that at least one of `k` attempts is right, if `right` of `attempts` were (arXiv:2107.03374).

    1 - C(n - c, k) / C(n, k), the mean over all subsets of k attempts, in integers of any size.
    """
    return 1.0 - comb(attempts - right, k) / comb(attempts, k)


def wilson(right: float, count: int, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of the proportion `right / count` of independent trials."""
    z = NormalDist().inv_cdf((1.0 + level) / 2.0)
    share = right / count
    centre = share + z * z / (2 * count)
    half = z * (share * (1.0 - share) / count + z * z / (4.0 * count * count)) ** 0.5
    scale = 1.0 + z * z / count
    # exactly 0 and 1 when all trials are equal; the formula gives them only up to rounding
    low = 0.0 if right == 0 else (centre - half) / scale
    return low, 1.0 if right == count else (centre + half) / scale


def bootstrap(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Percentile interval of the mean from `RESAMPLES` resamples with replacement; deterministic."""
    array = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(_SEED)
    block = max(1, _BLOCK // len(array))
    sizes = (min(block, RESAMPLES - start) for start in range(0, RESAMPLES, block))
    means = [array[rng.integers(0, len(array), (size, len(array)))].mean(axis=1) for size in sizes]
    low, high = np.quantile(np.concatenate(means), [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return float(low), float(high)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per prompt, with Wilson's interval if all are 0 or 1, else the bootstrap's."""
    mean = float(np.mean(values))
    if not np.isfinite(mean):
        return Estimate(mean, None, None, None)
    if all(value in (0.0, 1.0) for value in values):
        return Estimate(mean, *wilson(sum(values), len(values)), "wilson")
    return _resampled(values, mean)


def paired_difference(first: Sequence[float], other: Sequence[float]) -> Estimate:
    """The mean of `other - first` over prompts, with its bootstrap interval."""
    differences = [b - a for a, b in zip(first, other, strict=True)]
    return _resampled(differences, float(np.mean(differences)))


def _resampled(values: Sequence[float], mean: float) -> Estimate:
    if not np.isfinite(mean) or max(values) - min(values) < 1e-12:  # all resamples are equal
        return Estimate(mean, None, None, None)
    return Estimate(mean, *bootstrap(values), "bootstrap")
