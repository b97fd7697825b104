"""Confidence intervals of proportions."""

from __future__ import annotations

from statistics import NormalDist

LEVEL = 0.95
"""Confidence level of the intervals."""


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
