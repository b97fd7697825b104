"""Summaries of a run for the report: its headline, the facts on its card, and its settings."""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from rlframework.base.secrets import hide_secrets
from rlframework.observers.console import duration
from rlframework.observers.run_environment import flatten, setting_text
from rlframework.observers.runs import Run, read_run
from rlframework_report.curve import seconds_of

FACTS = {
    "algorithm": "algorithm.name", "environment": "environment.name", "model": "policy.model_name",
    "backend": "policy.backend", "workers": "worker_group.num_workers", "seed": "seed",
}  # fmt: skip
"""Labels and keys of the configuration that the card of a run shows."""
HEADLINE_METRICS = (
    ("validation/accuracy", "held-out accuracy", max),
    ("validation/reward", "held-out reward", max),
    ("validation/loss", "held-out loss", min),
    ("train/accuracy", "training accuracy", max),
    ("train/reward", "training reward", max),
    ("train/loss", "training loss", min),
)
"""Metric, label and choice of the better value. A run's headline is the first of these metrics that it has."""

LONGEST = 2000
"""Maximum number of characters in a value of a configuration that the page shows."""


class Headline(TypedDict, total=False):
    """Last and best value of one of `HEADLINE_METRICS`; only an empty `word` and `state` for a run without them."""

    word: str
    state: str
    last: str
    last_step: int
    best: str
    best_step: int


def headlines(run: Run) -> list[Headline]:
    """The headline of each of `HEADLINE_METRICS` that the run has with a finite value."""
    planned = flatten(run.config or {}).get("algorithm.num_steps") or math.inf
    state = "finished" if run.finished or run.last_step >= planned else f"not finished, at step {run.last_step:,}"
    found: list[Headline] = []
    for name, word, better in HEADLINE_METRICS:
        points = list(zip(*run.series(name), strict=True))
        if points:
            form = "{:.1%}" if "accuracy" in name else "{:.4g}"
            (best_step, best), (last_step, last) = better(points, key=lambda point: point[1]), points[-1]
            found.append({"word": word, "state": state, "last": form.format(last), "last_step": int(last_step),
                          "best": form.format(best), "best_step": int(best_step)})  # fmt: skip
    return found or [{"word": "", "state": state}]


def facts_of(run: Run) -> list[tuple[str, str]]:
    """Labels and texts for the run's card, without unknown values."""
    config = flatten(run.config or {})
    rows = {word: config.get(key) for word, key in FACTS.items()}
    if rows["workers"] is not None:
        rows["workers"] = f"{rows['workers']} ({config.get('worker_group.name')})"
    planned = config.get("algorithm.num_steps")
    rows["steps"] = f"{run.last_step:,}" + (f" of {planned:,}" if planned else "")
    for line in headlines(run):
        if line["word"].startswith("held-out"):
            best = f"best {line['best']} at step {line['best_step']:,}"
            rows[line["word"]] = f"{best}, last {line['last']} at step {line['last_step']:,}"
    rows["training time"] = duration(seconds_of(run.history)[-1])
    return [(word, str(value)) for word, value in rows.items() if value is not None]


def settings_of(values: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Flatten `{"a": {"b": 1}}` to `{"a.b": "1"}` and hide secrets. None stays None.

    Lists of items with a `name` are flattened by name. Of environments before a resume (`earlier`), only the start
    times are kept.
    """
    if values is None:
        return None
    found = {name: _by_name(value) for name, value in flatten(hide_secrets(values)).items()}
    if found.get("algorithm.num_steps") == 0:  # then it is that of num_epochs
        del found["algorithm.num_steps"]
    if "earlier" in found:
        found["earlier"] = ", ".join(str(one.get("started")) for one in values["earlier"])
    return {name: _text(name, value) for name, value in flatten(found).items()}


def _by_name(value: Any) -> Any:
    """A list of mappings with names as a mapping of texts; any other value unchanged."""
    if not (isinstance(value, list) and value and all(isinstance(one, Mapping) and "name" in one for one in value)):
        return value
    texts = defaultdict(list)
    for one in value:
        texts[one["name"]].append(" ".join(_text(name, part) for name, part in one.items() if name != "name"))
    return {name: ", ".join(each) for name, each in texts.items()}


def _text(name: str, value: Any) -> str:
    if name.endswith("_bytes") and isinstance(value, (int, float)):
        return f"{value / 2**30:,.1f} GiB"
    return setting_text(value, LONGEST)


def read_runs(paths: Sequence[Path]) -> list[Run]:
    """Read the runs in `paths`, at least one, without duplicates, under distinct names."""
    unique = [Path(path) for path in dict.fromkeys(os.path.realpath(path) for path in paths)]
    return [read_run(path, name) for path, name in zip(unique, names_of(unique), strict=True)]


def names_of(paths: Sequence[Path]) -> list[str]:
    """Distinct names for `paths`: their shortest suffixes, all with the same number of parts."""
    for count in range(1, max(len(path.parts) for path in paths)):
        names = ["/".join(path.parts[-count:]) for path in paths]
        if len(set(names)) == len(paths):
            return names
    return [str(path) for path in paths]
