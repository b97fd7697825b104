"""The summary of each run on the page: its settings, progress and results; and its configuration as text."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from itertools import islice
from typing import Any, NotRequired, TypedDict

from rlframework.observers.console import duration
from rlframework.observers.jsonl import seconds_of
from rlframework.observers.report.reading import Run
from rlframework.observers.secrets import hide_secrets

HEADLINE_METRICS = (
    ("validation/accuracy", "held-out accuracy", max),
    ("validation/reward", "held-out reward", max),
    ("validation/loss", "held-out loss", min),
    ("train/accuracy", "training accuracy", max),
    ("train/reward", "training reward", max),
    ("train/loss", "training loss", min),
)
"""Metric, label and choice of the better value. A run's headline is the first of these metrics that it has."""
FACTS = (
    ("algorithm", "algorithm.name"),
    ("environment", "environment.name"),
    ("model", "policy.model_name"),
    ("backend", "policy.backend"),
    ("workers", "worker_group.num_workers"),
    ("seed", "seed"),
)
"""Labels and keys of the configuration that the card of a run shows."""
KEYS, LONGEST = 5000, 2000
"""Maximum number of keys, and of characters in a value, that the page shows of a configuration."""


class Headline(TypedDict):
    """Last and best value of a run's most important metric, if it has one of `HEADLINE_METRICS`."""

    word: str
    state: str
    last: NotRequired[str]
    last_step: NotRequired[int]
    best: NotRequired[str]
    best_step: NotRequired[int]


def headlines(run: Run) -> list[Headline]:
    """The headline of each of `HEADLINE_METRICS` that the run has with a finite value."""
    planned = lookup(run.config, "algorithm.num_steps")
    done = run.finished or (isinstance(planned, int) and run.last_step >= planned)
    state = "finished" if done else f"not finished, at step {run.last_step:,}"
    found: list[Headline] = []
    for name, word, better in HEADLINE_METRICS:
        points = list(zip(*run.series(name), strict=True))
        if points:
            form = "{:.1%}" if "accuracy" in name else "{:.4g}"
            (best_step, best), (last_step, last) = better(points, key=lambda point: point[1]), points[-1]
            found.append(Headline(word=word, state=state, last=form.format(last), last_step=int(last_step),
                                  best=form.format(best), best_step=int(best_step)))  # fmt: skip
    return found or [Headline(word="", state=state)]


def facts_of(run: Run) -> list[tuple[str, str]]:
    """Labels and texts for the run's card, without unknown values."""
    rows = {word: lookup(run.config, key) for word, key in FACTS}
    if rows["workers"] is not None and (group := lookup(run.config, "worker_group.name")):
        rows["workers"] = f"{rows['workers']} ({group})"
    planned = lookup(run.config, "algorithm.num_steps")
    rows["steps"] = f"{run.last_step:,} of {planned:,}" if isinstance(planned, int) else f"{run.last_step:,}"
    for line in headlines(run):
        if line["word"].startswith("held-out"):
            last = f"{line['last']} at step {line['last_step']:,}"
            best = f"best {line['best']} at step {line['best_step']:,}, last "
            rows[line["word"]] = f"{last}, the last and best" if line["best_step"] == line["last_step"] else best + last
    rows["training time"] = duration(seconds_of(run.history)[-1])
    rows |= _clock(run)
    return [(word, str(value)) for word, value in rows.items() if value is not None and value != ""]


def _clock(run: Run) -> dict[str, str]:
    """The wall-clock duration of the run, and when its first line was written."""
    times = [row["time"] for row in run.history if "time" in row and 0 < row["time"] < 1e11]
    passed = times[-1] - times[0] + run.history[0].get("time/step", 0.0) if times else math.inf
    if not 0 <= passed < math.inf:
        return {}
    first = datetime.fromtimestamp(times[0], UTC).strftime("%Y-%m-%d %H:%M UTC")
    return {"duration": duration(passed), "first line": first}


def lookup(values: Mapping[str, Any] | None, dotted: str) -> Any:
    """The value at a dotted key such as `a.b`; None if there is none."""
    for name in dotted.split("."):
        values = values.get(name) if isinstance(values, Mapping) else None
    return values


def flatten(values: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Flatten `{"a": {"b": 1}}` to `{"a.b": "1"}`, at most `KEYS` keys, and hide secrets. None stays None.

    Items with a `name` become keys: `{"gpus": [{"name": "x", "cores": 2}]}` is flattened to `{"gpus.x": "2"}`. Of
    environments before a resume (`earlier`), only the start times are kept.
    """
    if values is None:
        return None
    found = {name: value for name, value in values.items() if name != "earlier"}
    if earlier := [one for one in values.get("earlier") or () if isinstance(one, Mapping)]:
        found["earlier starts"] = ", ".join(_text(one.get("started")) for one in earlier)
    return dict(islice(_walk(hide_secrets(found), ""), KEYS))


def _walk(values: Mapping[Any, Any], before: str) -> Iterator[tuple[str, str]]:
    for name, value in values.items():
        key = f"{before}{name}"
        if isinstance(value, Mapping) and value:
            yield from _walk(value, f"{key}.")
        elif isinstance(value, list) and value and all(isinstance(one, Mapping) and "name" in one for one in value):
            for index, one in enumerate(value):
                twin = f" ({index})" if one["name"] in [other["name"] for other in value[:index]] else ""
                rest = {inner: part for inner, part in one.items() if inner != "name"}
                yield f"{key}.{one['name']}{twin}", " ".join(text for _, text in _walk(rest, ""))
        elif key.endswith("_bytes") and isinstance(value, (int, float)):
            yield key, f"{value / 2**30:,.1f} GiB"
        else:
            yield key, _text(value)


def _text(value: Any) -> str:
    text = value if isinstance(value, str) and value.strip() else json.dumps(value, default=str)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"
