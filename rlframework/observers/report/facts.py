"""The summary at the top of the page: each run's settings, progress and results."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Any

from rlframework.observers.console import duration
from rlframework.observers.report.reading import Run
from rlframework.observers.report.settings import lookup
from rlframework.observers.series import seconds_of

HEADLINE_METRICS = (
    ("validation/accuracy", "held-out accuracy", max),
    ("validation/reward", "held-out reward", max),
    ("validation/loss", "held-out loss", min),
    ("train/accuracy", "training accuracy", max),
    ("train/reward", "training reward", max),
    ("train/loss", "training loss", min),
)
"""Metric, label and choice of the better value. A run's headline is the first of these metrics that it has."""


def best_and_last(run: Run, name: str) -> tuple[float, int, float, int] | None:
    """The best value and its first step, and the last value and its step; None without finite values."""
    better = next((choose for metric, _, choose in HEADLINE_METRICS if metric == name), max)
    points = [(row[name], int(row["step"])) for row in run.history if name in row and math.isfinite(row[name])]
    if not points:
        return None
    best = better(points, key=lambda point: point[0])
    return (*best, *points[-1])


def headline_of(run: Run) -> dict[str, Any] | None:
    """The headline of a run: last and best value of the first of `HEADLINE_METRICS` that it has."""
    for name, word, _ in HEADLINE_METRICS:
        if (found := best_and_last(run, name)) is not None:
            best, best_step, last, last_step = found
            return {"word": word, "metric": name, "last": _value(name, last), "last_step": last_step,
                    "best": _value(name, best), "best_step": best_step, "state": _state(run)}  # fmt: skip
    return {"word": "", "metric": "", "state": _state(run)}


def facts_of(run: Run) -> list[tuple[str, str]]:
    """Labels and texts for the run's card, without unknown values."""
    config = run.config
    workers, group = lookup(config, "worker_group.num_workers"), lookup(config, "worker_group.name")
    rows: list[tuple[str, Any]] = [
        ("algorithm", lookup(config, "algorithm.name")),
        ("environment", lookup(config, "environment.name")),
        ("model", lookup(config, "policy.model_name")),
        ("backend", lookup(config, "policy.backend")),
        ("workers", f"{workers} ({group})" if workers is not None and group else workers),
        ("seed", lookup(config, "seed")),
        ("steps", _steps(run)),
        *(
            (word, _best_and_last_text(run, name))
            for name, word, _ in HEADLINE_METRICS
            if name.startswith("validation/")
        ),
        ("training time", duration(seconds_of(run.history)[-1])),
        *_clock(run),
    ]
    return [(word, str(value)) for word, value in rows if value is not None and value != ""]


def _best_and_last_text(run: Run, name: str) -> str | None:
    found = best_and_last(run, name)
    if found is None:
        return None
    best, best_step, last, last_step = found
    if best_step == last_step:
        return f"{_value(name, last)} at step {last_step:,}, the last and best"
    return f"best {_value(name, best)} at step {best_step:,}, last {_value(name, last)} at step {last_step:,}"


def _value(name: str, value: float) -> str:
    return f"{value:.1%}" if "accuracy" in name else f"{value:.4g}"


def _steps(run: Run) -> str:
    planned = lookup(run.config, "algorithm.num_steps")
    return f"{run.last_step:,} of {planned:,}" if isinstance(planned, int) else f"{run.last_step:,}"


def _state(run: Run) -> str:
    planned = lookup(run.config, "algorithm.num_steps")
    done = run.finished or (isinstance(planned, int) and run.last_step >= planned)
    return "finished" if done else f"not finished, at step {run.last_step:,}"


def _clock(run: Run) -> list[tuple[str, str]]:
    """The wall-clock duration of the run, and when its first line was written."""
    times = [row["time"] for row in run.history if "time" in row and 0 < row["time"] < 1e11]
    if not times:
        return []
    first = datetime.fromtimestamp(times[0], UTC).strftime("%Y-%m-%d %H:%M UTC")
    began = times[0] - run.history[0].get("time/step", 0.0)
    passed = times[-1] - began
    return [("duration", duration(passed)), ("first line", first)] if 0 <= passed < math.inf else []
