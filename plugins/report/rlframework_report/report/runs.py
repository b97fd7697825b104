"""A run on the page of the report: its headline, the facts on its card, its settings, and its samples.

Samples, with their turns and images, are thinned to what a page can hold: kept or dropped as complete steps.
"""

from __future__ import annotations

import base64
import json
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from rlframework.base.secrets import hide_secrets
from rlframework.observers.console import duration
from rlframework.observers.jsonl import FOLDER
from rlframework.observers.run_environment import flatten, setting_text
from rlframework.observers.runs import Run, Sample, Turn, read_run
from rlframework_report.curve import seconds_of

_NAME = re.compile(r"[0-9a-f]{32}\.jpg")
_JPEG = b"\xff\xd8\xff"
_MOST_BYTES = 65_536
"""No copy of an image that a run stores has as many, so a larger file is none."""

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
MOST_TEXT = 4000
"""Maximum number of characters in one prompt or completion."""


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


def samples_of(run: Run, budget: int, images: int) -> dict[str, Any]:
    """The samples as `rows` of step, kind, index of the prompt, completion, reward, other fields, and any turns.

    If any prompts or turns have images, `prompt_images` has the names of those of each prompt, and `images` those by
    name that fit the page, from the last step on.
    """
    short = [
        row.model_copy(update={"prompt": _truncate(row.prompt), "completion": _truncate(row.completion)})
        for row in run.samples
    ]
    kept = thin_samples(short, budget)
    prompts = {key: number for number, key in enumerate(dict.fromkeys((row.prompt, row.images) for row in kept))}
    rows = []
    for row in kept:
        reward = None if row.reward is None or not math.isfinite(row.reward) else round(row.reward, 4)
        extra = {name: str(value)[:500] for name, value in (row.model_extra or {}).items() if value is not None}
        extra |= {name: f"{value:.4g}" for name, value in row.metrics.items()}
        turns = [[_turn(turn) for turn in _with_input(row)]] if row.turns else []
        rows.append([row.step, row.kind, prompts[row.prompt, row.images], row.completion, reward, extra, *turns])
    found = {"total": len(run.samples), "prompts": [prompt for prompt, _ in prompts], "rows": rows}
    if not any(row.images or any(map(_turn_images, row.turns)) for row in kept):
        return found
    return {**found, "prompt_images": [names for _, names in prompts], "images": _images(run.path, kept, images)}


def _images(output_dir: Path, rows: Sequence[Sample], budget: int) -> dict[str, str]:
    """The images of `rows` as data URIs of at most `budget` characters, those of the last rows first."""
    found: dict[str, str] = {}
    shown = (name for row in reversed(rows) for names in (row.images, *map(_turn_images, row.turns)) for name in names)
    for name in dict.fromkeys(shown):
        uri = image_uri(output_dir, name)
        if uri is not None and len(uri) <= budget:
            found[name], budget = uri, budget - len(uri)
    return found


def image_uri(output_dir: Path, name: str) -> str | None:
    """Return the stored image `name` as a data URI; None if there is none.

    A run's files may be others' work, so nothing else is read, whatever is named.
    """
    path = output_dir / FOLDER / name
    if not _NAME.fullmatch(name) or not path.is_file() or path.stat().st_size > _MOST_BYTES:
        return None
    content = path.read_bytes()
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}" if content.startswith(_JPEG) else None


def thin_samples(rows: Sequence[Sample], budget: int) -> list[Sample]:
    """Select rows of about `budget` characters: complete steps, evenly spaced per kind, always with the last step."""
    kinds = {row.kind for row in rows}
    kept = set()
    for kind in kinds:
        sizes: Counter[int] = Counter()
        for row in rows:
            if row.kind == kind:
                sizes[row.step] += len(row.completion) + len(row.prompt) + 40 + sum(map(_turn_size, _with_input(row)))
        steps = sorted(sizes, reverse=True)
        thinned = (steps[::stride] for stride in range(1, len(steps)))
        fitting = (some for some in thinned if sum(sizes[step] for step in some) <= budget // len(kinds))
        kept |= {(kind, step) for step in next(fitting, steps[:1])}
    return [row for row in rows if (row.kind, row.step) in kept]


def _with_input(row: Sample) -> list[Turn]:
    """The messages of an episode, and before them the text that its first turn continues, if it is known."""
    first = [Turn(role="model input", content=row.model_input)] if row.turns and row.model_input else []
    return [*first, *row.turns]


def _turn(turn: Turn) -> dict[str, Any]:
    """A message for the page: its role and text, whether it is sampled and trained on, its reward and tool calls."""
    content = turn.content
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    shown: dict[str, Any] = {"role": turn.role, "text": _truncate(str(content or "")), "trained": turn.trained}
    if turn.row is not None:
        shown["row"] = turn.row
    if turn.sampled:
        shown["sampled"] = True
    if turn.reasoning_content:
        shown["reasoning"] = _truncate(turn.reasoning_content)
    if calls := [call.get("function") or {} for call in turn.tool_calls]:
        shown["calls"] = [_truncate(f"{call.get('name', '')}({call.get('arguments', '')})") for call in calls]
    if images := _turn_images(turn):
        shown["images"] = images
    if turn.reward is not None and math.isfinite(turn.reward):
        shown["reward"] = round(turn.reward, 4)
    return shown


def _turn_images(turn: Turn) -> list[str]:
    """The names of the images of a message."""
    parts = turn.content if isinstance(turn.content, list) else []
    return [str(part["image"]) for part in parts if isinstance(part, dict) and part.get("image")]


def _turn_size(turn: Turn) -> int:
    """About the number of characters of a message on the page."""
    return len(json.dumps(_turn(turn), ensure_ascii=False))


def _truncate(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}\n… {len(text) - MOST_TEXT:,} more characters"


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
