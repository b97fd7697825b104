"""The report page's data as JSON values. Numbers are rounded to the precision visible in a chart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from rlframework import __version__
from rlframework.observers.report.facts import facts_of, headline_of
from rlframework.observers.report.metrics import Chart, arrange, phase_of, split_of
from rlframework.observers.report.reading import Run
from rlframework.observers.report.settings import environment_of, flatten
from rlframework.observers.report.thinning import POINTS, Series, thin, thin_samples
from rlframework.observers.series import seconds_of, series

BUDGET = 600_000
"""Maximum number of characters in samples, over all runs."""
NUMBERS = 250_000
"""Maximum number of values in series, over all runs."""
COLUMNS = 160
"""Maximum number of columns in a chart of phase times."""
LONGEST = 4000
"""Maximum number of characters in one prompt or completion."""


def content(runs: Sequence[Run], smooth: int) -> dict[str, Any]:
    """The data of the page; `smooth` is its initial smoothing span in steps."""
    names = list(dict.fromkeys(name for run in runs for row in run.history for name in row))
    groups, listed = arrange(names), len(names) or 1
    points = max(100, min(POINTS, NUMBERS // (len(runs) * listed)))
    return {
        "title": runs[0].name if len(runs) == 1 else f"{len(runs)} runs",
        "made": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "version": __version__,
        "smooth": smooth,
        "splits": {name: split_of(name) for name in names},
        "groups": [_group(key, title, charts, runs) for key, title, charts in groups],
        "runs": [_run(run, points, BUDGET // len(runs)) for run in runs],
    }


def _group(key: str, title: str, charts: Sequence[Chart], runs: Sequence[Run]) -> dict[str, Any]:
    """The charts of a group. Constant metrics and copies of another metric are listed as text instead."""
    values = {chart.quantity: _only_value(chart, runs) for chart in charts}
    copies = _copies([chart for chart in charts if values[chart.quantity] is None], runs)
    return {
        "key": key,
        "title": title,
        "charts": [asdict(chart) for chart in charts if values[chart.quantity] is None and chart.title not in copies],
        "same": list(copies.items()),
        "constant": [[chart.title, values[chart.quantity]] for chart in charts if values[chart.quantity] is not None],
    }


def _copies(charts: Sequence[Chart], runs: Sequence[Run]) -> dict[str, str]:
    """Map the title of each chart whose training values equal those of an earlier chart to that chart's title.

    Accuracy is never dropped as a copy: readers look for it even if it equals the reward.
    """
    copies: dict[str, str] = {}
    seen: list[tuple[str, list[float | None]]] = []
    for chart in charts:
        training = [name for name in chart.names if split_of(name) != "validation"]
        values = [row.get(name) for name in training for run in runs for row in run.history]
        original = next((title for title, others in seen if _nearly_equal(values, others)), None)
        if original is not None and chart.quantity != "accuracy" and len(training) == len(chart.names):
            copies[chart.title] = original
        else:
            seen.append((chart.title, values))
    return copies


def _nearly_equal(values: Sequence[float | None], others: Sequence[float | None]) -> bool:
    """Whether the two series look the same in a chart."""
    if not values or len(values) != len(others):
        return False
    tolerance = 1e-4 * max((abs(value) for value in values if value is not None and math.isfinite(value)), default=0.0)
    return all(
        one == other if one is None or other is None else math.isclose(one, other, abs_tol=tolerance)
        for one, other in zip(values, others, strict=True)
    )


def _only_value(chart: Chart, runs: Sequence[Run]) -> float | None:
    found = {row[name] for run in runs for row in run.history for name in chart.names if name in row}
    value = found.pop() if len(found) == 1 else None
    several = sum(name in row for run in runs for row in run.history for name in chart.names) > 1
    return value if value is not None and several and math.isfinite(value) else None


def _run(run: Run, points: int, budget: int) -> dict[str, Any]:
    places: list[list[float]] = []
    at = [float(row["step"]) for row in run.history]
    clock = thin(at, seconds_of(run.history), points, points // 2)
    names = dict.fromkeys(name for row in run.history for name in row)
    return {
        "name": run.name,
        "path": str(run.path),
        "headline": headline_of(run),
        "facts": facts_of(run),
        "notes": list(run.notes),
        "clock": [list(clock.at), _rounded(clock.mean)],
        "series": {
            name: _encode_series(thin(*series(run.history, name, at), points, points // 2), places)
            for name in names
            if name not in ("step", "time") and phase_of(name) is None
        },
        "bad": {name: bad for name in names if (bad := _not_finite(run, name))},
        "places": places,
        "phases": phases_of(run),
        "samples": _samples(run, budget),
        "config": flatten(run.config),
        "environment": environment_of(run.environment),
    }


def _encode_series(points: Series, places: list[list[float]]) -> list[Any]:
    """The index of its positions in `places` (appended if new), means, and minima and maxima if present."""
    at = [_whole(position) for position in points.at]
    if at not in places:
        places.append(at)
    ends = [] if points.low is None or points.high is None else [_rounded(points.low), _rounded(points.high)]
    return [places.index(at), _rounded(points.mean), *ends]


def _not_finite(run: Run, name: str) -> list[int]:
    return [int(row["step"]) for row in run.history if name in row and not math.isfinite(row[name])][:200]


def phases_of(run: Run, columns: int = COLUMNS) -> dict[str, Any] | None:
    """Seconds of each phase: means over equal ranges of steps, and totals over the run. None without phases.

    The last phase, `other`, is the remainder of `time/step`.
    """
    rows = [row for row in run.history if any(phase_of(name) for name in row)]
    if not rows:
        return None
    names = list(dict.fromkeys(phase for row in rows for name in row if (phase := phase_of(name))))
    table = [_phase_row(row, names) for row in rows]
    if any(row[-1] > 0 for row in table):
        names.append("other")
    size = math.ceil(len(table) / columns)
    parts = [range(begin, min(begin + size, len(table))) for begin in range(0, len(table), size)]
    return {
        "names": names,
        "from": [int(rows[part[0]]["step"]) for part in parts],
        "to": [int(rows[part[-1]]["step"]) for part in parts],
        "values": [_rounded([_mean([table[i][n] for i in part]) for part in parts]) for n in range(len(names))],
        "totals": _rounded([math.fsum(row[n] for row in table) for n in range(len(names))]),
    }


def _phase_row(row: Mapping[str, float], names: Sequence[str]) -> list[float]:
    spent = [_time(row.get(f"time/{name}", 0.0)) for name in names]
    rest = _time(row.get("time/step", 0.0)) - math.fsum(spent)
    return [*spent, rest if rest > 0 else 0.0]


def _time(value: float) -> float:
    return value if math.isfinite(value) and value > 0 else 0.0


def _samples(run: Run, budget: int) -> dict[str, Any]:
    """The samples as `rows` of step, kind, index of the prompt, completion, reward, and other fields."""
    short = [
        {**row, "prompt": _truncate(row["prompt"]), "completion": _truncate(row["completion"])} for row in run.samples
    ]
    kept = thin_samples(short, budget)
    prompts = {prompt: number for number, prompt in enumerate(dict.fromkeys(row["prompt"] for row in kept))}
    rows = [
        [
            row["step"],
            row["kind"],
            prompts[row["prompt"]],
            row["completion"],
            _finite_or_none(row["reward"]),
            _extra_fields(row),
        ]
        for row in kept
    ]
    return {"total": len(run.samples), "prompts": list(prompts), "rows": rows}


def _extra_fields(row: Mapping[str, Any]) -> dict[str, str]:
    known = ("run", "step", "kind", "prompt", "completion", "reward")
    return {str(name): str(value)[:500] for name, value in row.items() if name not in known and value is not None}


def _truncate(text: str) -> str:
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n… {len(text) - LONGEST:,} more characters"


def _finite_or_none(value: float | None) -> float | None:
    return round(value, 4) if value is not None and math.isfinite(value) else None


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _rounded(values: Sequence[float]) -> list[float]:
    return [_whole(float(f"{value:.5g}")) for value in values]


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value
