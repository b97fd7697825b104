"""The result of an evaluation: unbiased pass@k, confidence intervals, and the report as a table and as JSON.

Intervals treat the prompts as the random sample: Wilson's (1927) for the proportion of prompts, a percentile bootstrap
with a fixed seed for any other mean. They do not cover the variation between seeds of sampling or of training.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cached_property
from math import isnan
from typing import TYPE_CHECKING, Any

from rlframework.algorithms.intervals import LEVEL, RESAMPLES, Estimate, estimate, resampled
from rlframework.algorithms.recording import plain_json
from rlframework.base.errors import DataError
from rlframework.base.secrets import hide_secrets
from rlframework.observers.host import cpu_name, package_version
from rlframework.plugins.configure import dump_config
from rlframework.workers.machine import cpu_count

if TYPE_CHECKING:
    from rich.console import Group

    from rlframework.rollout.parts import Parts
    from rlframework.runner.models import ModelSource
    from rlframework_tools.evaluation.plan import EvaluationPlan

_REPORTED_SECTIONS = {"seed", "device", "plugins", "policy", "environment", "generation", "worker_group"}
_PACKAGES = {"rlframework": "rlframework-core", "torch": "torch", "transformers": "transformers", "numpy": "numpy"}


@dataclass
class Evaluation:
    """The result of an evaluation. `values` has one value per prompt for each metric, in the order of `ids`: NaN for a
    prompt that does not have it.

    `failures` counts the completions on which the user's reward function failed, `failed_episodes` the episodes whose
    environment failed.
    """

    ids: list[str] = field(default_factory=list)
    values: dict[str, list[float]] = field(default_factory=dict)
    failures: int = 0
    failed_episodes: int = 0
    seconds: float = 0.0

    @cached_property
    def estimates(self) -> dict[str, Estimate]:
        """The mean of each metric, once all values are there.

        Values that are all 0 have no interval unless the metric is a share of completions: it may be a penalty.
        """
        present = {name: found for name, values in self.values.items() if (found := _present(values))}
        return {name: (estimate if any(of) or _is_share(name) else resampled)(of) for name, of in present.items()}

    def add(self, ids: Sequence[str], columns: Mapping[str, Sequence[float]]) -> None:
        """Add prompts with one value for each metric that they have."""
        for name in dict.fromkeys([*self.values, *columns]):
            missing = [float("nan")] * len(ids)
            self.values.setdefault(name, [float("nan")] * len(self.ids)).extend(columns.get(name, missing))
        self.ids += ids


def _is_share(metric: str) -> bool:
    return metric.startswith("pass@") or metric in ("accuracy", "truncated_fraction")


def _present(values: Sequence[float]) -> list[float]:
    return [value for value in values if not isnan(value)]


def paired_difference(first: Sequence[float], other: Sequence[float]) -> Estimate:
    """The mean of `other - first` over the prompts that have both values, with its bootstrap interval."""
    return resampled(_present([b - a for a, b in zip(first, other, strict=True)]))


def summary(source: ModelSource, parts: Parts, plan: EvaluationPlan, result: Evaluation) -> dict[str, Any]:
    """The contents of `summary.json`."""
    generation, workers = parts.config.generation, parts.policy.get_info()
    config = hide_secrets(dump_config(parts.config))
    return {
        "subject": source.name,
        "model": source.model,
        "environment": parts.config.environment.name,
        "split": plan.split,
        "prompts": len(result.ids),
        "attempts": plan.attempts,
        "greedy": plan.greedy,
        "temperature": 0.0 if plan.greedy else generation.temperature,
        "max_new_tokens": generation.max_new_tokens,
        "seed": parts.config.seed,
        "metrics": _as_json(result.estimates),
        "reward_failures": result.failures,
        "failed_episodes": result.failed_episodes,
        "interval": {"level": LEVEL, "over": "prompts", "bootstrap_resamples": RESAMPLES},
        "completions": "completions.jsonl",
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(result.seconds, 3),
        "machine": {
            "cpu": cpu_name(),
            "cores": cpu_count(),
            "workers": len(workers),
            "devices": [str(worker.get("device_name", "unknown")) for worker in workers],
            "system": f"{platform.system()} {platform.release()}",
        },
        "versions": {
            "python": platform.python_version(),
            **{name: package_version(of) for name, of in _PACKAGES.items()},
        },
        "config": {name: value for name, value in config.items() if name in _REPORTED_SECTIONS},
    }


def differences(first: Evaluation, other: Evaluation) -> dict[str, Estimate]:
    """The paired difference `other - first` of each metric. Both must have evaluated the same prompts."""
    if first.ids != other.ids:
        raise DataError(
            "the models were evaluated on different prompts, because the data changed in between. Evaluate again"
        )
    return {
        name: paired_difference(values, other.values[name])
        for name, values in first.values.items()
        if name in other.values
    }


def comparison(models: Sequence[ModelSource], results: Sequence[Evaluation]) -> dict[str, Any]:
    """The contents of `comparison.json`: the differences of each model from the first."""
    interval = {"level": LEVEL, "over": "prompts", "method": "paired bootstrap", "resamples": RESAMPLES}
    found = [
        {"subject": source.name, "metrics": _as_json(differences(results[0], result))}
        for source, result in zip(models[1:], results[1:], strict=True)
    ]
    return {"from": models[0].name, "interval": interval, "differences": found}


def _as_json(estimates: dict[str, Estimate]) -> Any:
    return plain_json({name: asdict(found) for name, found in estimates.items()})


def as_table(plan: EvaluationPlan, results: Sequence[Evaluation]) -> Group:
    """A table of metrics by model with intervals, and of differences from the first model."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    letters = [chr(ord("A") + number) for number in range(len(results))]
    names = [source.name for source in plan.models]
    if len(names) > 1:
        names = [f"{letter}: {name}" for letter, name in zip(letters, names, strict=True)]
    others = [differences(results[0], result) for result in results[1:]]
    table = Table()
    table.add_column("metric", no_wrap=True)
    for name in [*names, *(f"{letter} - A" for letter in letters[1:])]:
        table.add_column(Text(name), justify="right")
    between = "\n" if others else "  "  # a comparison fits into 80 columns
    for metric in results[0].estimates:
        cells = [_cell(metric, result.estimates.get(metric)) for result in results]
        cells += [_cell(metric, other.get(metric), signed=True) for other in others]
        table.add_row(metric, *(Text(between.join(cell)) for cell in cells))
    failed = [
        Text(f"the reward function failed on {result.failures:,} completions of {name}; they count as failed_reward")
        for name, result in zip(names, results, strict=True)
        if result.failures
    ]
    failed += [
        Text(f"{result.failed_episodes:,} episodes of {name} failed; they count as wrong, with reward 0")
        for name, result in zip(names, results, strict=True)
        if result.failed_episodes
    ]
    how = "greedy" if plan.greedy else "sampled"
    attempts = "" if plan.attempts == 1 else f", {plan.attempts} attempts each"
    title = f"{len(results[0].ids):,} {plan.split} prompts, {how}{attempts}; {LEVEL:.0%} intervals over prompts"
    return Group(Text(title), table, *failed)


def _cell(metric: str, given: Estimate | None, *, signed: bool = False) -> tuple[str, str]:
    """The texts of the value and its interval; empty if the model's completions do not have the metric."""
    if given is None:
        return "", ""
    share = _is_share(metric)
    scale, digits = (100.0, 1) if share else (1.0, 1 if metric == "completion_length" else 3)
    unit = "" if not share else " points" if signed else " %"
    form = f"{'+' if signed else ''}.{digits}f"
    value = f"{given.value * scale:{form}}{unit}"
    if given.low is None or given.high is None:
        return value, "[-]"
    return value, f"[{given.low * scale:{form}}, {given.high * scale:{form}}]"
