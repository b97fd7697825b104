"""The charts of the report: metrics arranged into groups, without constants and copies.

Unknown metrics get a chart too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlframework.observers.runs import Run

GROUPS = (
    ("async", "Asynchronous training", r"^async/"),
    ("refit", "Refits of the generation engines", r"^(refit/|time/refit$|refit_seconds$)"),
    ("speed", "Speed and memory", r"^(throughput|memory|time)/"),
    ("outcome", "Reward and accuracy", r"reward|accuracy|(pass|avg)[@_]|score|return|win_rate|correct"),
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
    "truncated/max_new_tokens": "Episodes cut at generation.max_new_tokens",
    "truncated/max_turns": "Episodes cut at environment.max_turns",
    "truncated/max_episode_tokens": "Episodes cut at environment.max_episode_tokens",
    "truncated/agent_request": "Episodes cut at a request's max_tokens",
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

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Chart:
    """A chart of all metrics (`train/x`, `validation/x`) of one quantity."""

    quantity: str
    title: str
    names: Sequence[str]
    intervals: Sequence[str]
    """Those of `names` with a confidence interval, the metrics of `bounds_of`; it is drawn as a band."""
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


def bounds_of(name: str) -> tuple[str, str]:
    """The metrics with the bounds of the confidence interval of `name`, if it has one."""
    return f"{name}_low", f"{name}_high"


def arrange(names: Iterable[str]) -> list[tuple[str, str, list[Chart]]]:
    """Identifier, heading and charts of each non-empty group, in the order of the page."""
    quantities: dict[str, list[str]] = {}
    names = set(names)
    with_interval = {name for name in names if names.issuperset(bounds_of(name))}
    bounds = {bound for name in with_interval for bound in bounds_of(name)}
    for name in sorted(names - {"step", "time"} - BROKEN_DOWN - bounds):
        if phase_of(name) is None or name == "time/refit":
            quantities.setdefault(name.removeprefix(f"{split_of(name)}/"), []).append(name)
    groups: dict[str, list[Chart]] = {}
    for quantity in sorted(quantities, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name)):
        words = re.sub(r"[_/]+", " ", quantity).strip() or quantity
        title = TITLES.get(quantity, words[:1].upper() + words[1:])
        percent = re.search(r"accuracy|fraction|mfu$|rate$|(pass|avg)[@_]", quantity) is not None
        planned = re.search(r"(^|/|_)lr$|learning_rate", quantity) is not None
        group = next(key for key, _, pattern in GROUPS if re.search(pattern, quantity))
        of_chart = quantities[quantity]
        intervals = [name for name in of_chart if name in with_interval]
        groups.setdefault(group, []).append(Chart(quantity, title, of_chart, intervals, percent, planned))
    titles = {key: title for key, title, _ in GROUPS}
    return [(key, titles[key], groups[key]) for key in ORDER if key in groups]


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
