"""A run's metrics as series: what the files on disk and the `history` of a result have in common.

A history is a list of one mapping a step, from metric name to value, with the step under `step` where it is known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

History = Sequence[Mapping[str, float]]


def step_of(row: Mapping[str, float], index: int) -> int:
    """The step of `row`, the `index`-th row of its history; counted from 1 where the row does not say."""
    return int(row.get("step", index + 1))


def last_step(history: History) -> int:
    """The greatest step of `history`; 0 when it is empty."""
    return max((step_of(row, index) for index, row in enumerate(history)), default=0)


def seconds_of(history: History) -> list[float]:
    """Seconds of training at the end of each row: the running sum of `time/step`."""
    total = 0.0
    seconds = []
    for row in history:
        spent = row.get("time/step", 0.0)
        total += spent if math.isfinite(spent) else 0.0
        seconds.append(total)
    return seconds


def series(history: History, name: str, at: Sequence[float]) -> tuple[list[float], list[float]]:
    """Places and values of metric `name` where it is there and finite; `at[i]` is the place of row `i`."""
    points = [
        (place, float(row[name]))
        for place, row in zip(at, history, strict=True)
        if name in row and math.isfinite(row[name])
    ]
    return [place for place, _ in points], [value for _, value in points]


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Mean over the `window` neighbours centred on each value; at the ends over those of them that are there."""
    half = max(window, 1) // 2
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    spans = [(max(index - half, 0), min(index + half + 1, len(values))) for index in range(len(values))]
    return [(sums[end] - sums[begin]) / (end - begin) for begin, end in spans]
