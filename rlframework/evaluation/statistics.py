"""What an evaluation says beyond its mean: pass@k without bias, and how far the same measurement would scatter.

Intervals are over prompts, which are what was drawn: of a proportion of prompts Wilson's (1927), of any other mean a
percentile bootstrap with a fixed seed. Left out: what another seed of the sampling, or of the training, would give.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import TYPE_CHECKING

import numpy as np

from rlframework.errors import UserError

if TYPE_CHECKING:
    import numpy.typing as npt

LEVEL = 0.95
"""Share of the intervals that hold the true mean."""

RESAMPLES = 10_000
_SEED = 2107
_TOGETHER = 4_000_000
"""Numbers drawn at once: 32 MB."""


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts with its interval at `LEVEL`, by `wilson` or `bootstrap`.

    None where there is nothing to tell it from: values that are all alike (and no proportion), or not finite.
    """

    value: float
    low: float | None
    high: float | None
    method: str | None


def pass_at_k(attempts: int, right: int, k: int) -> float:
    """The chance that at least one of `k` attempts is right, where `right` of `attempts` were (arXiv:2107.03374).

    1 - C(n - c, k) / C(n, k), the mean over all choices of k attempts, as a product that cannot overflow.
    """
    if not 1 <= k <= attempts or not 0 <= right <= attempts:
        raise UserError(f"pass@{k} cannot be told from {right} right of {attempts} attempts: k goes from 1 to attempts")
    if attempts - right < k:
        return 1.0
    return 1.0 - float(np.prod([(attempts - right - i) / (attempts - i) for i in range(k)]))


def wilson(right: float, count: int, level: float = LEVEL) -> tuple[float, float]:
    """Wilson's score interval of a proportion: `right` of `count` independent trials."""
    z = NormalDist().inv_cdf((1.0 + level) / 2.0)
    share = right / count
    centre = share + z * z / (2 * count)
    half = z * (share * (1.0 - share) / count + z * z / (4.0 * count * count)) ** 0.5
    scale = 1.0 + z * z / count
    # the ends are 0 and 1 exactly where all trials are alike, up to rounding
    low = 0.0 if right == 0 else (centre - half) / scale
    return low, 1.0 if right == count else (centre + half) / scale


def bootstrap(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Percentiles of the mean over prompts drawn anew with replacement, `RESAMPLES` times; the same on every call."""
    array = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(_SEED)
    block = max(1, _TOGETHER // len(array))
    means: list[npt.NDArray[np.float64]] = []
    for start in range(0, RESAMPLES, block):
        chosen = rng.integers(0, len(array), (min(block, RESAMPLES - start), len(array)))
        means.append(array[chosen].mean(axis=1))
    low, high = np.quantile(np.concatenate(means), [(1.0 - level) / 2.0, (1.0 + level) / 2.0])
    return float(low), float(high)


def estimate(values: Sequence[float]) -> Estimate:
    """The mean of one value a prompt: a proportion where each is 0 or 1, any other number by the bootstrap."""
    mean = float(np.mean(values))
    if not np.isfinite(mean):
        return Estimate(mean, None, None, None)
    if all(value in (0.0, 1.0) for value in values):
        return Estimate(mean, *wilson(sum(values), len(values)), "wilson")
    return _resampled(values, mean)


def paired_difference(first: Sequence[float], other: Sequence[float]) -> Estimate:
    """The mean of `other - first`, prompt by prompt, by the bootstrap over prompts."""
    differences = [theirs - own for own, theirs in zip(first, other, strict=True)]
    return _resampled(differences, float(np.mean(differences)))


def _resampled(values: Sequence[float], mean: float) -> Estimate:
    if not np.isfinite(mean) or max(values) - min(values) < 1e-12:  # drawing anew would always give the same
        return Estimate(mean, None, None, None)
    return Estimate(mean, *bootstrap(values), "bootstrap")
