"""The report page's data as JSON values: metrics arranged into charts, thinned and rounded to what a page can hold.

Series keep their extremes and end points; samples are kept or dropped as complete steps. Unknown metrics get a chart
too.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypedDict

import numpy as np

from rlframework import __version__
from rlframework.observers.jsonl import seconds_of
from rlframework.observers.report.runs import Run, Sample, Turn, facts_of, headlines, settings_of
from rlframework.observers.report.timeline import timeline_of
from rlframework.observers.sample_images import image_uri

GROUPS = (
    ("async", "Asynchronous training", r"^async/"),
    ("refit", "Refits of the generation engines", r"^(refit/|time/refit$|refit_seconds$)"),
    ("speed", "Speed and memory", r"^(throughput|memory|time)/"),
    ("outcome", "Reward and accuracy", r"reward|accuracy|pass[@_]|score|return|win_rate|correct"),
    ("optimisation", "Optimisation", r"loss|grad|(^|/|_)lr$|learning_rate|skipped|non_finite|weight_norm"),
    ("policy", "Policy", r"kl|entropy|clip|ratio|logprob|advantage|importance"),
    (
        "completions",
        "Completions and batch",
        r"length|truncated|tok|samples|groups|completion|invalid|failed|episode|breaks|calls",
    ),
    ("other", "Other metrics", r""),
)
"""Identifier, heading, and pattern of metric names; the first matching group is used."""
ORDER = ("outcome", "optimisation", "policy", "completions", "speed", "refit", "async", "other")
FIRST = (
    "reward", "accuracy", "reward_std", "shaped_reward", "loss", "policy_loss", "grad_norm", "lr", "kl", "entropy",
    "clip_fraction", "ratio", "completion_length", "truncated_fraction", "throughput/mfu",
    "throughput/model_tflops_per_worker", "throughput/tokens_per_second", "throughput/tokens_per_second_per_worker",
    "time/step",
)  # fmt: skip
TITLES = {
    "lr": "Learning rate", "kl": "KL to the reference", "grad_norm": "Gradient norm",
    "memory/rss_mb": "Memory of the driver (RSS), MiB", "memory/peak_mb": "Peak worker memory, MiB",
    "throughput/tokens_per_second": "Tokens per second", "throughput/mfu": "Model FLOPs utilization of training",
    "throughput/tokens_per_second_per_worker": "Tokens per second and worker",
    "throughput/model_tflops_per_worker": "Model TFLOP/s of training, per worker",
    "memory/peak_reserved_mb": "Peak of reserved GPU memory, MiB", "time/device/wait": "Waiting for the GPU, seconds",
    "time/step": "Seconds per step", "ratio": "Probability ratio",
    "generation_kl": "KL, generation to trainer", "global_valid_toks": "Tokens in the loss",
    "generation_logprob_difference": "Log-prob difference, generation to trainer", "tokens": "Tokens per step",
    "generation_logprob_difference_max": "Largest log-prob difference", "num_valid_samples": "Rows in the loss",
    "generation_logprob_beyond_fraction": "Tokens whose log-prob difference is beyond the bound",
    "importance_weight": "Importance weight, trainer over generation",
    "importance_truncated_fraction": "Importance weights at the cap",
    "samples": "Held-out samples", "template_breaks": "Template breaks per hundred turns",
    "episode_turns": "Turns per episode", "episode_rows": "Training rows per episode",
    "failed_episodes": "Failed episodes", "tool_calls": "Tool calls per episode",
    "malformed_tool_calls": "Malformed tool calls per episode",
    "reward_std": "Reward spread in a group", "refit/mb": "Weights sent, MiB",
    "refit/version": "Version of the weights", "refit/probe_error": "Error of the probes' log-probabilities",
    "refit/dropped_tokens": "Cached tokens dropped", "time/refit": "Seconds per refit",
    "refit_seconds": "Seconds of the refit before a validation",
    "async/staleness_mean": "Mean staleness of tokens, in steps", "async/staleness_max": "Largest staleness of a token",
    "async/mixed_version_groups": "Groups with tokens of several versions",
    "async/failed_groups": "Failed groups", "async/given_up_prompts": "Prompts given up",
    "async/trainer_idle_fraction": "Idle time of the trainer", "async/engine_idle_fraction": "Idle time of the engines",
}  # fmt: skip

BREAKDOWNS = (
    ("Time of the device in profiled steps", "time/device/{}",
     ("compute", "exposed_communication", "copies", "idle")),
    ("GPU memory in training, MiB", "memory/{}_mb", ("weights", "optimizer", "gradients", "activations")),
    ("Peak memory by phase, MiB", "memory/peak_{}_mb", ("training", "scoring", "generation", "refit", "other")),
)  # fmt: skip
"""Title, form of the metrics' names, and parts. The parts add up, except the peaks of the last."""
BROKEN_DOWN = frozenset(form.format(part) for _, form, parts in BREAKDOWNS for part in parts) | {
    "time/device/communication"
}
"""Metrics without a chart of their own."""
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
LONGEST = 4000
"""Maximum number of characters in one prompt or completion."""
COLUMNS = 160
"""Maximum number of columns in a chart of phase times."""

Array = np.ndarray[Any, Any]
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


@dataclass(frozen=True)
class Chart:
    """A chart of all metrics (`train/x`, `validation/x`) of one quantity."""

    quantity: str
    title: str
    names: Sequence[str]
    percent: bool
    planned: bool
    """True if the quantity is scheduled, not measured, such as the learning rate; it is not smoothed."""


def split_of(name: str) -> str:
    """The split of a metric, `train` or `validation`; empty for metrics such as `memory/rss_mb`."""
    head = name.partition("/")[0]
    return head if head in ("train", "validation") else ""


def phase_of(name: str) -> str | None:
    """The phase of a metric, such as `generate` for `time/generate`; None for all other metrics."""
    found = re.fullmatch(r"time/(?!step$)([^/]+)", name)
    return found[1] if found else None


def arrange(names: Iterable[str]) -> list[tuple[str, str, list[Chart]]]:
    """Identifier, heading and charts of each non-empty group, in the order of the page."""
    quantities: dict[str, list[str]] = {}
    for name in sorted(set(names) - {"step", "time"} - BROKEN_DOWN):
        if phase_of(name) is None or name == "time/refit":
            quantities.setdefault(name.removeprefix(f"{split_of(name)}/"), []).append(name)
    groups: dict[str, list[Chart]] = {}
    for quantity in sorted(quantities, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)):
        words = re.sub(r"[_/]+", " ", quantity).strip() or quantity
        title = TITLES.get(quantity, words[:1].upper() + words[1:])
        percent = re.search(r"accuracy|fraction|mfu$|rate$|pass[@_]", quantity) is not None
        planned = re.search(r"(^|/|_)lr$|learning_rate", quantity) is not None
        group = next(key for key, _, pattern in GROUPS if re.search(pattern, quantity))
        groups.setdefault(group, []).append(Chart(quantity, title, quantities[quantity], percent, planned))
    titles = {key: title for key, title, _ in GROUPS}
    return [(key, titles[key], groups[key]) for key in ORDER if key in groups]


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


def worth_drawing(
    charts: Sequence[Chart], runs: Sequence[Run]
) -> tuple[list[Chart], list[tuple[str, str]], list[tuple[str, float]]]:
    """Return the charts to draw; the titles of copies, each with the original's; and of constants, with their value.

    A copy has the same training values as an earlier chart. Accuracy is never dropped as a copy: readers look for it.
    """
    drawn: list[tuple[Chart, Array]] = []
    constant: list[tuple[str, float]] = []
    copies: list[tuple[str, str]] = []
    for chart in charts:
        present = [row[name] for run in runs for row in run.history for name in chart.names if name in row]
        training = [name for name in chart.names if split_of(name) != "validation"]
        values = np.array([row.get(name, math.nan) for name in training for run in runs for row in run.history])
        original = next((earlier.title for earlier, others in drawn if _nearly_equal(values, others)), None)
        if len(present) > 1 and len(set(present)) == 1 and math.isfinite(present[0]):
            constant.append((chart.title, present[0]))
        elif original is not None and chart.quantity != "accuracy" and len(training) == len(chart.names):
            copies.append((chart.title, original))
        else:
            drawn.append((chart, values))
    return [chart for chart, _ in drawn], copies, constant


def _nearly_equal(values: Array, others: Array) -> bool:
    """Whether the two series look the same in a chart."""
    if not values.size or values.shape != others.shape:
        return False
    tolerance = 1e-4 * np.abs(values[np.isfinite(values)]).max(initial=0.0)
    return np.allclose(values, others, rtol=1e-9, atol=tolerance, equal_nan=True)


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
        "samples": _samples(run, budget, images),
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


def _samples(run: Run, budget: int, images: int) -> dict[str, Any]:
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
    return [Turn(role="model input", content=row.model_input), *row.turns] if row.model_input else list(row.turns)


def _turn(turn: Turn) -> dict[str, Any]:
    """A message for the page: its role and text, whether it is sampled and trained on, its reward and tool calls."""
    content = turn.content
    if isinstance(content, list):
        content = "".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    shown: dict[str, Any] = {"role": turn.role, "text": _truncate(str(content or "")), "trained": turn.trained}
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
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}\n… {len(text) - LONGEST:,} more characters"


def _rounded(values: Sequence[float] | Array) -> list[float]:
    return [_whole(float(f"{value:.5g}")) for value in values]


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value
