"""Thins out series and samples for the page, keeping series' extremes and end points, and complete steps of samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

POINTS = 1000
"""Series of at most this many points are not thinned."""
BUCKETS = 500
"""Longer series are reduced to at most this many buckets, each with its minimum and maximum."""


@dataclass(frozen=True)
class Series:
    """Points of a metric. `low` and `high` are the extremes of each bucket; None if the series was not thinned."""

    at: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


def thin(at: Sequence[float], values: Sequence[float], points: int = POINTS, buckets: int = BUCKETS) -> Series:
    """Reduce `values` (finite) at positions `at` to equal buckets if there are more than `points`.

    The first and the last value each keep their own bucket.
    """
    count = len(values)
    if count <= points:
        return Series(at, values)
    size = math.ceil((count - 2) / (buckets - 2))
    spans = [(0, 1), *((i, min(i + size, count - 1)) for i in range(1, count - 1, size)), (count - 1, count)]
    parts = [values[begin:end] for begin, end in spans]
    return Series(
        [(at[begin] + at[end - 1]) / 2 for begin, end in spans],
        [math.fsum(part) / len(part) for part in parts],
        [min(part) for part in parts],
        [max(part) for part in parts],
    )


def smoothed(at: Sequence[float], values: Sequence[float], span: float) -> list[float]:
    """Bias-corrected exponential moving average over about `span` steps; 1 leaves `values` unchanged.

    A value `d` steps back has `((span - 1) / (span + 1)) ** d` times the weight of the newest.
    """
    decay = (span - 1) / (span + 1)
    total = weight = 0.0
    result = []
    for index, value in enumerate(values):
        keep = decay ** max(at[index] - at[index - 1], 0.0) if index else 0.0
        total, weight = total * keep + value, weight * keep + 1.0
        result.append(total / weight)
    return result


def thin_samples(rows: Sequence[Mapping[str, Any]], budget: int) -> list[Mapping[str, Any]]:
    """Select rows of about `budget` characters: complete steps, evenly spaced per kind, always with the last step."""
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    kept: set[tuple[str, int]] = set()
    for kind in kinds:
        steps: dict[int, int] = {}
        for row in rows:
            if row["kind"] == kind:
                steps[row["step"]] = steps.get(row["step"], 0) + len(row["completion"]) + len(row["prompt"]) + 40
        kept |= {(kind, step) for step in _spread(steps, budget // len(kinds))}
    return [row for row in rows if (row["kind"], row["step"]) in kept]


def _spread(sizes: Mapping[int, int], budget: int) -> list[int]:
    """Every k-th step counting back from the last, with the smallest k that fits into `budget`."""
    steps = sorted(sizes, reverse=True)
    stride = 1
    while stride < len(steps) and sum(sizes[step] for step in steps[::stride]) > budget:
        stride += 1
    return steps[::stride]
