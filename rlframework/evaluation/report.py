"""Report evaluations as a table, and as JSON with everything needed to repeat them."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rlframework.configure import dump_config
from rlframework.errors import DataError
from rlframework.evaluation.evaluate import COMPLETIONS, Evaluation, EvaluationSettings
from rlframework.evaluation.statistics import LEVEL, RESAMPLES, Estimate, paired_difference
from rlframework.observers.host import cpu_name, package_version
from rlframework.training.recording import plain_json
from rlframework.workers.machine import cpu_count

if TYPE_CHECKING:
    from rich.console import Group

    from rlframework.algorithm import Parts
    from rlframework.evaluation.plan import ModelSource

_REPORTED_SECTIONS = ("seed", "device", "plugins", "policy", "environment", "generation", "worker_group")
_PACKAGES = {"rlframework": "rlframework-core", "torch": "torch", "transformers": "transformers", "numpy": "numpy"}


def summary(source: ModelSource, parts: Parts, settings: EvaluationSettings, result: Evaluation) -> dict[str, Any]:
    """The contents of `summary.json`."""
    generation, workers = parts.config.generation, parts.policy.get_info()
    return {
        "subject": source.name,
        "model": source.model,
        "environment": parts.config.environment.name,
        "split": settings.split,
        "prompts": len(result.ids),
        "attempts": settings.attempts,
        "greedy": settings.greedy,
        "temperature": 0.0 if settings.greedy else generation.temperature,
        "max_new_tokens": generation.max_new_tokens,
        "seed": parts.config.seed,
        "metrics": plain_json({name: asdict(found) for name, found in result.estimates.items()}),
        "reward_failures": result.failures,
        "interval": {"level": LEVEL, "over": "prompts", "bootstrap_resamples": RESAMPLES},
        "completions": COMPLETIONS,
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
        "config": {name: value for name, value in dump_config(parts.config).items() if name in _REPORTED_SECTIONS},
    }


def differences(first: Evaluation, other: Evaluation) -> dict[str, Estimate]:
    """The paired difference `other - first` of each metric. Both must have evaluated the same prompts."""
    if first.ids != other.ids:
        raise DataError(
            "the models were evaluated on different prompts, because the data changed in between. Evaluate again"
        )
    return {name: paired_difference(values, other.values[name]) for name, values in first.values.items()}


def comparison(models: Sequence[ModelSource], results: Sequence[Evaluation]) -> dict[str, Any]:
    """The contents of `comparison.json`: the differences of each model from the first."""
    found = []
    for source, result in zip(models[1:], results[1:], strict=True):
        metrics = {name: asdict(value) for name, value in differences(results[0], result).items()}
        found.append({"subject": source.name, "metrics": plain_json(metrics)})
    interval = {"level": LEVEL, "over": "prompts", "method": "paired bootstrap", "resamples": RESAMPLES}
    return {"from": models[0].name, "interval": interval, "differences": found}


def as_table(models: Sequence[ModelSource], results: Sequence[Evaluation], settings: EvaluationSettings) -> Group:
    """A table of metrics by model with intervals, and of differences from the first model."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    several = len(models) > 1
    names = [f"{chr(ord('A') + number)}: {s.name}" if several else s.name for number, s in enumerate(models)]
    others = [differences(results[0], result) for result in results[1:]]
    table = Table()
    table.add_column("metric", no_wrap=True)
    for name in [*names, *(f"{chr(ord('B') + number)} - A" for number in range(len(others)))]:
        table.add_column(Text(name), justify="right")
    for metric in results[0].estimates:
        cells = [_cell(metric, result.estimates[metric]) for result in results]
        cells += [_cell(metric, other[metric], signed=True) for other in others]
        between = "\n" if several else "  "  # a comparison fits into 80 columns
        table.add_row(metric, *(Text(between.join(cell)) for cell in cells))
    failed = [
        Text(f"the reward function failed on {result.failures:,} completions of {name}; they count as failed_reward")
        for name, result in zip(names, results, strict=True)
        if result.failures
    ]
    how = "greedy" if settings.greedy else "sampled"
    attempts = "" if settings.attempts == 1 else f", {settings.attempts} attempts each"
    title = f"{len(results[0].ids):,} {settings.split} prompts, {how}{attempts}; {LEVEL:.0%} intervals over prompts"
    return Group(Text(title), table, *failed)


def _cell(metric: str, given: Estimate, *, signed: bool = False) -> tuple[str, str]:
    """The texts of the value and its interval."""
    share = metric.startswith("pass@") or metric in ("accuracy", "truncated_fraction")
    scale, digits = (100.0, 1) if share else (1.0, 1 if metric == "completion_length" else 3)
    unit = "" if not share else " points" if signed else " %"
    form = f"{'+' if signed else ''}.{digits}f"
    value = f"{given.value * scale:{form}}{unit}"
    if given.low is None or given.high is None:
        return value, "[-]"
    return value, f"[{given.low * scale:{form}}, {given.high * scale:{form}}]"
