"""A run's metrics as series, both from files and from the `history` of a result.

A history has one mapping per step, from metric name to value, with the step as `step` if it is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

History = Sequence[Mapping[str, float]]


def step_of(row: Mapping[str, float], index: int) -> int:
    """The step of `row`; if it has no `step`, its `index` in the history plus 1."""
    return int(row.get("step", index + 1))


def last_step(history: History) -> int:
    """The largest step in `history`; 0 if it is empty."""
    return max((step_of(row, index) for index, row in enumerate(history)), default=0)


def seconds_of(history: History) -> list[float]:
    """Seconds of training up to the end of each row: the cumulative sum of `time/step`."""
    total = 0.0
    seconds = []
    for row in history:
        spent = row.get("time/step", 0.0)
        total += spent if math.isfinite(spent) else 0.0
        seconds.append(total)
    return seconds


def series(history: History, name: str, at: Sequence[float]) -> tuple[list[float], list[float]]:
    """Positions and values of metric `name`, skipping missing and non-finite values; `at[i]` is row `i`'s position."""
    points = [
        (position, float(row[name]))
        for position, row in zip(at, history, strict=True)
        if name in row and math.isfinite(row[name])
    ]
    return [position for position, _ in points], [value for _, value in points]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Centred moving average over `window` values, truncated at both ends."""
    half = max(window, 1) // 2
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    spans = [(max(index - half, 0), min(index + half + 1, len(values))) for index in range(len(values))]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in spans]
