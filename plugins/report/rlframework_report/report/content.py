"""The report page's data as JSON values, thinned and rounded to what a page can hold.

Series keep their extremes and end points.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, TypedDict

import numpy as np

from rlframework import __version__
from rlframework.observers.runs import Run
from rlframework_report.curve import seconds_of
from rlframework_report.report.charts import (
    BREAKDOWNS,
    BROKEN_DOWN,
    Array,
    Chart,
    arrange,
    phase_of,
    split_of,
    worth_drawing,
)
from rlframework_report.report.runs import facts_of, headlines, samples_of, settings_of
from rlframework_report.report.timeline import timeline_of

BARS = 8
"""Maximum number of steps in a breakdown: the last ones that have it."""

POINTS = 1000
"""Series of at most this many points are not thinned; longer ones have at most half as many buckets."""
NUMBERS = 250_000
"""Maximum number of values in series, over all runs."""
BUDGET = 600_000
"""Maximum number of characters in samples, over all runs."""
IMAGES = 1_500_000
"""Maximum number of characters in their images, over all runs."""
COLUMNS = 160
"""Maximum number of columns in a chart of phase times."""

Phases = TypedDict(
    "Phases",
    {"names": list[str], "from": list[int], "to": list[int], "values": list[list[float]], "totals": list[float]},
)
"""Seconds of each phase: means over ranges of steps, and totals over the run."""


class Breakdown(TypedDict):
    """The values of the parts `names` at some steps. If they do not add up, there is one step."""

    title: str
    names: list[str]
    bars: list[tuple[int, list[float]]]
    adds_up: bool


def content(runs: Sequence[Run], smooth: int) -> dict[str, Any]:
    """The data of the page; `smooth` is its initial smoothing span in steps."""
    names = list(dict.fromkeys(name for run in runs for name in run.names))
    points = max(100, min(POINTS, NUMBERS // (len(runs) * len(names))))
    return {
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "smooth": smooth,
        "splits": {name: split_of(name) for name in names},
        "groups": [_group(key, title, charts, runs) for key, title, charts in arrange(names)],
        "runs": [_run(run, points, BUDGET // len(runs), IMAGES // len(runs)) for run in runs],
    }


def _group(key: str, title: str, charts: Sequence[Chart], runs: Sequence[Run]) -> dict[str, Any]:
    """The charts of a group. Constant metrics and copies of another metric are listed as text instead."""
    drawn, copies, constant = worth_drawing(charts, runs)
    return {"key": key, "title": title, "charts": list(map(asdict, drawn)), "same": copies, "constant": constant}


def _run(run: Run, points: int, budget: int, images: int) -> dict[str, Any]:
    places: list[list[float]] = []
    clock_at, clock, *_ = thin(run.steps, seconds_of(run.history), points)
    hidden = BROKEN_DOWN | {"step", "time"}
    shown = [name for name in run.names if name not in hidden and phase_of(name) is None]
    bad = {name: [int(row["step"]) for row in run.history if not math.isfinite(row.get(name, 0.0))][:200]
           for name in run.names}  # fmt: skip
    return {
        "name": run.name,
        "path": str(run.path),
        "headline": headlines(run)[0],
        "facts": facts_of(run),
        "notes": list(run.notes),
        "clock": [clock_at, _rounded(clock)],
        "series": {name: _encode_series(*thin(*run.series(name), points), places=places) for name in shown},
        "bad": {name: steps for name, steps in bad.items() if steps},
        "places": places,
        "phases": phases_of(run),
        "timeline": timeline_of(run),
        "breakdowns": breakdowns_of(run),
        "samples": samples_of(run, budget, images),
        "config": settings_of(run.config),
        "environment": settings_of(run.environment),
    }


def thin(at: Sequence[float], values: Sequence[float], points: int = POINTS) -> list[list[float]]:
    """Reduce more than `points` finite `values` at positions `at` to at most half as many equal buckets.

    Returns positions and means, and also minima and maxima if the series was reduced. The first and the last value each
    keep their own bucket.
    """
    count = len(values)
    if count <= points:
        return [list(at), list(values)]
    size = math.ceil((count - 2) / (max(3, points // 2) - 2))
    starts = np.array([0, *range(1, count - 1, size), count - 1])
    ends = np.append(starts[1:], count)
    return [
        ((np.take(at, starts) + np.take(at, ends - 1)) / 2).tolist(),
        (np.add.reduceat(values, starts) / (ends - starts)).tolist(),
        np.minimum.reduceat(values, starts).tolist(),
        np.maximum.reduceat(values, starts).tolist(),
    ]


def _encode_series(at: list[float], *values: list[float], places: list[list[float]]) -> list[int | list[float]]:
    """The index of the positions in `places` (appended if new), and the rounded values."""
    at = [_whole(position) for position in at]
    if at not in places:
        places.append(at)
    return [places.index(at), *map(_rounded, values)]


def phases_of(run: Run, columns: int = COLUMNS) -> Phases | None:
    """The times of the run's phases over at most `columns` equal ranges of steps. None without phases.

    The last phase, `other`, is the remainder of `time/step`.
    """
    names = [phase for name in run.names if (phase := phase_of(name))]
    rows = [row for row in run.history if any(f"time/{name}" in row for name in names)]
    if not rows:
        return None
    spent = np.array([[row.get(f"time/{name}", 0.0) for name in (*names, "step")] for row in rows])
    spent = np.where(np.isfinite(spent) & (spent > 0), spent, 0.0)
    spent[:, -1] = np.maximum(spent[:, -1] - spent[:, :-1].sum(axis=1), 0.0)
    if spent[:, -1].any():
        names.append("other")
    starts = np.arange(0, len(rows), math.ceil(len(rows) / columns))
    ends = np.append(starts[1:], len(rows))
    means = np.add.reduceat(spent, starts) / (ends - starts)[:, None]
    return {
        "names": names,
        "from": [int(rows[start]["step"]) for start in starts],
        "to": [int(rows[end - 1]["step"]) for end in ends],
        "values": [_rounded(means[:, index]) for index in range(len(names))],
        "totals": _rounded(spent.sum(axis=0)[: len(names)]),
    }


def breakdowns_of(run: Run) -> list[Breakdown]:
    """The breakdowns that the run has: of time those of the last profiled steps, of memory that of the highest peak."""
    found: list[Breakdown] = []
    for title, form, parts in BREAKDOWNS:
        metrics = [form.format(part) for part in parts]
        rows = [row for row in run.history if any(math.isfinite(row.get(name, math.nan)) for name in metrics)]
        if not rows:
            continue
        adds_up = form != "memory/peak_{}_mb"
        if form.startswith("memory/"):
            rows = [max(rows, key=lambda row: row.get("memory/peak_mb", 0.0))]
        bars = [(int(row["step"]), _rounded([row.get(name, 0.0) for name in metrics])) for row in rows[-BARS:]]
        names = [part.replace("_", " ") for part in parts]
        found.append({"title": title, "names": names, "bars": bars, "adds_up": adds_up})
    return found


def _rounded(values: Sequence[float] | Array) -> list[float]:
    return [_whole(float(f"{value:.5g}")) for value in values]


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value
