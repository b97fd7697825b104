"""Arranges metrics into charts and groups of charts. Unknown metrics get a chart too."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

GROUPS: Sequence[tuple[str, str, str]] = (
    ("speed", "Speed and memory", r"^(throughput|memory|time)/"),
    ("outcome", "Reward and accuracy", r"reward|accuracy|pass[@_]|score|return|win_rate|correct"),
    ("optimisation", "Optimisation", r"loss|grad|(^|/|_)lr$|learning_rate|skipped|non_finite|weight_norm"),
    ("policy", "Policy", r"kl|entropy|clip|ratio|logprob|advantage|importance"),
    ("completions", "Completions and batch", r"length|truncated|tok|samples|groups|completion|invalid|failed"),
    ("other", "Other metrics", r""),
)
"""Identifier, heading, and pattern of metric names; the first matching group is used."""

ORDER = ("outcome", "optimisation", "policy", "completions", "speed", "other")
FIRST = (
    "reward", "accuracy", "reward_std", "shaped_reward", "loss", "policy_loss", "grad_norm", "lr", "kl", "entropy",
    "clip_fraction", "ratio", "completion_length", "truncated_fraction", "throughput/tokens_per_second", "time/step",
)  # fmt: skip
TITLES = {
    "lr": "Learning rate", "kl": "KL to the reference", "grad_norm": "Gradient norm",
    "memory/rss_mb": "Memory of the driver (RSS), MiB", "memory/peak_mb": "Peak worker memory, MiB",
    "throughput/tokens_per_second": "Tokens per second", "time/step": "Seconds per step", "ratio": "Probability ratio",
    "generation_kl": "KL, generation to trainer", "global_valid_toks": "Tokens in the loss",
    "generation_logprob_difference": "Log-prob difference, generation to trainer", "tokens": "Tokens per step",
    "generation_logprob_difference_max": "Largest log-prob difference", "num_valid_samples": "Rows in the loss",
    "samples": "Held-out samples", "reward_std": "Reward spread in a group",
}  # fmt: skip
SPLITS = ("train", "validation")
NOT_METRICS = ("step", "time")


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
    return head if head in SPLITS else ""


def quantity_of(name: str) -> str:
    """The name of a metric without its split."""
    return name.partition("/")[2] if split_of(name) else name


def phase_of(name: str) -> str | None:
    """The phase of a metric, such as `generate` for `time/generate`; None for all other metrics."""
    head, _, phase = name.partition("/")
    return phase if head == "time" and phase and phase != "step" and "/" not in phase else None


def arrange(names: Iterable[str]) -> list[tuple[str, str, list[Chart]]]:
    """Identifier, heading and charts of each non-empty group, in the order of the page."""
    quantities: dict[str, list[str]] = {}
    for name in sorted(names):
        if name not in NOT_METRICS and phase_of(name) is None:
            quantities.setdefault(quantity_of(name), []).append(name)
    groups: dict[str, list[Chart]] = {}
    for quantity in sorted(quantities, key=_rank):
        group = next(key for key, _, pattern in GROUPS if re.search(pattern, quantity))
        groups.setdefault(group, []).append(_chart(quantity, quantities[quantity]))
    titles = {key: title for key, title, _ in GROUPS}
    return [(key, titles[key], groups[key]) for key in ORDER if key in groups]


def _rank(quantity: str) -> tuple[int, str]:
    return (FIRST.index(quantity) if quantity in FIRST else len(FIRST), quantity)


def _chart(quantity: str, names: Sequence[str]) -> Chart:
    words = re.sub(r"[_/]+", " ", quantity).strip() or quantity
    percent = bool(re.search(r"accuracy|fraction|rate$|pass[@_]", quantity))
    planned = bool(re.search(r"(^|/|_)lr$|learning_rate", quantity))
    return Chart(quantity, TITLES.get(quantity, words[:1].upper() + words[1:]), names, percent, planned)
