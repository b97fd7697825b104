"""`results/parity.md`: the figures of `results/parity.json`, layout by layout."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pieces import page as page_of
from pieces import table

RESULTS = Path(__file__).resolve().parents[1] / "results"
QUANTITIES = {
    "log-probabilities": "log-probs",
    "mean of log-probabilities": "mean",
    "loss": "loss",
    "gradient norm": "gradient norm",
    "weights": "weights",
    "update": "update",
    "tensor": "worst tensor",
}
_TEXT = """The largest relative errors of each backend against the oracle, a plain single-process fp32 program with
torch and transformers, on the same batches. [The columns](../parity.md), and how to measure your own backend."""
_COMMAND = """```shell
rlframework parity dtensor dtensor:data=2 dtensor:tensor=2 dtensor:context=2 dtensor:data=2,tensor=2 \\
    --batching padded --batching dynamic --batching packed --checkpointing --json docs/results/parity.json
```"""
_ALGORITHMS_COMMAND = """```shell
rlframework parity BACKEND BACKEND:data=2 BACKEND:tensor=2 BACKEND:context=2 --algorithm sft --algorithm grpo ... \\
    --precision float32 --steps 3 --json FILE.json
```"""

Outcome = Mapping[str, Any]


def page() -> str:
    """Return the page."""
    report = json.loads((RESULTS / "parity.json").read_text(encoding="utf-8"))
    outcomes = report["outcomes"]
    groups = list(dict.fromkeys((one["precision"], one["backend"], one["layout"]) for one in outcomes))
    precisions = list(dict.fromkeys(group[0] for group in groups))
    parts = [
        "# Parity",
        _TEXT,
        _ran_on(report),
        _tolerances(report),
        "## Worst case per layout",
        "Over all batching modes, both losses, with and without activation checkpointing.",
        *(part for precision in precisions for part in (f"### In {precision}", _summary(outcomes, groups, precision))),
        "## All cases",
    ]
    for precision, backend, layout in groups:
        parts += [f"### {backend}, {layout}, {precision}", _all(_of(outcomes, (precision, backend, layout)))]
    parts[4:4] = _algorithms()
    return page_of(*parts, "[The JSON](parity.json), and [the command's own table](parity.txt).", _COMMAND)


def _algorithms() -> list[str]:
    """All algorithms over few steps, and some over many."""
    files = ("parity_algorithms.json", "parity_algorithms_20_steps.json")
    return ["## Algorithms", *(part for file in files for part in _worst_cases(file)), _ALGORITHMS_COMMAND]


def _worst_cases(file: str) -> list[str]:
    """The worst case of each algorithm on each backend, over its layouts, from the results in `file`."""
    report = json.loads((RESULTS / file).read_text(encoding="utf-8"))
    outcomes = report["outcomes"]
    backends = list(dict.fromkeys(one["backend"] for one in outcomes))
    rows = []
    for algorithm, backend in itertools.product(dict.fromkeys(one["loss"] for one in outcomes), backends):
        if found := [one for one in outcomes if (one["loss"], one["backend"]) == (algorithm, backend)]:
            rows.append((f"`{algorithm}`", f"`{backend}`", *_worst(found)))
    layouts = {name: [one["layout"] for one in outcomes if one["backend"] == name] for name in backends}
    compared = "; ".join(f"`{name}` in {', '.join(dict.fromkeys(found))}" for name, found in layouts.items())
    return [
        f"### {report['settings']['steps']} steps",
        (f"{_ran_on(report)} In float32, by `rlframework parity --algorithm`, the worst case over: {compared}."),
        table(("algorithm", "backend", *QUANTITIES.values(), "verdict"), rows),
        f"[The JSON]({file}).",
    ]


def _summary(outcomes: Sequence[Outcome], groups: Sequence[tuple[str, str, str]], precision: str) -> str:
    rows = [
        (f"`{backend}`, `{layout}`", *_worst(_of(outcomes, (found, backend, layout))))
        for found, backend, layout in groups
        if found == precision
    ]
    return table(("backend, layout", *QUANTITIES.values(), "verdict"), rows)


def _of(outcomes: Iterable[Outcome], group: tuple[str, str, str]) -> list[Outcome]:
    return [one for one in outcomes if (one["precision"], one["backend"], one["layout"]) == group]


def _worst(outcomes: Sequence[Outcome]) -> tuple[str, ...]:
    errors = [max(one["measurements"][name]["error"] for one in outcomes) for name in QUANTITIES]
    verdicts = sorted({one["verdict"] for one in outcomes})
    return *(f"`{error:.0e}`" for error in errors), " and ".join(verdicts)


def _all(outcomes: Sequence[Outcome]) -> str:
    rows = [(one["loss"], *_worst([one]), f"{one['seconds']:.1f}") for one in outcomes]
    return table(("loss, batching", *QUANTITIES.values(), "verdict", "seconds"), rows)


def _ran_on(report: Mapping[str, Any]) -> str:
    machine, settings = report["machine"], report["settings"]
    return (
        f"Run on {report['date'][:10]}: {machine['cpu']}, {machine['cores']} cores, on the {machine['device']}; Python "
        f"{machine['python']}, torch {machine['torch']}, transformers {machine['transformers']}; rlframework "
        f"{report['rlframework']}. {settings['steps']} steps of {settings['rows']} rows at a learning rate of "
        f"{settings['lr']:g}."
    )


def _tolerances(report: Mapping[str, Any]) -> str:
    allowed = ", ".join(f"{name} {value:g}" for name, value in report["tolerances"].items())
    return f"Allowed: {allowed}. The other bfloat16 figures have no tolerance."
