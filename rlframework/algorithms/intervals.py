"""Means over prompts with confidence intervals: Wilson's for proportions, the bootstrap's for others; pass@k."""

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


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its interval at `LEVEL`, by `wilson` or `bootstrap`.

    The interval is None for non-finite values, and for equal ones unless the mean is a proportion.
    """

    value: float
    low: float | None
    high: float | None
    method: str | None


def wilson(right: float, count: int) -> tuple[float, float]:
    """Wilson's score interval of the proportion `right / count` of independent trials."""
    z = NormalDist().inv_cdf((1.0 + LEVEL) / 2.0)
    share = right / count
    centre = share + z * z / (2 * count)
    half = z * (share * (1.0 - share) / count + z * z / (4.0 * count * count)) ** 0.5
    scale = 1.0 + z * z / count
    # exactly 0 and 1 when all trials are equal; the formula gives them only up to rounding
    low = 0.0 if right == 0 else (centre - half) / scale
    return low, 1.0 if right == count else (centre + half) / scale


def bootstrap(values: Sequence[float]) -> tuple[float, float]:
    """Percentile interval of the mean from `RESAMPLES` resamples with replacement; deterministic."""
    array = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(_SEED)
    blocks = (rng.integers(0, len(array), (100, len(array))) for _ in range(RESAMPLES // 100))
    means = np.concatenate([array[block].mean(axis=1) for block in blocks])
    low, high = np.quantile(means, [(1.0 - LEVEL) / 2.0, (1.0 + LEVEL) / 2.0])
    return float(low), float(high)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value per prompt, with Wilson's interval if all are 0 or 1, else the bootstrap's."""
    if set(values) <= {0.0, 1.0}:
        return Estimate(float(np.mean(values)), *wilson(sum(values), len(values)), "wilson")
    return resampled(values)


def resampled(values: Sequence[float]) -> Estimate:
    """The mean of `values` with the bootstrap's interval, None if all resamples have the same mean."""
    mean = float(np.mean(values)) if values else float("nan")
    if not np.isfinite(mean) or max(values) - min(values) < 1e-12:  # all resamples are equal
        return Estimate(mean, None, None, None)
    return Estimate(mean, *bootstrap(values), "bootstrap")


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """The probability that at least one of `k` attempts is right, if `right` of `attempts` were (arXiv:2107.03374).

    1 - C(n - c, k) / C(n, k), the mean over all subsets of k attempts, in integers of any size.
    """
    return 1.0 - comb(attempts - right, k) / comb(attempts, k)


def default_ks(attempts: int) -> list[int]:
    """The `k` of pass@k to report by default: the powers of two below `attempts`, and `attempts` itself."""
    return [*(2**power for power in range((attempts - 1).bit_length())), attempts]
