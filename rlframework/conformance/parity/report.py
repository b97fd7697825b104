"""What parity found, as a table, as sentences and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rlframework
from rlframework.conformance.contracts import BF16, FP32, TENSOR_AFTER_20_STEPS, WEIGHTS_AFTER_20_STEPS
from rlframework.conformance.parity import update
from rlframework.conformance.parity.outcome import AFTER_STEPS, UPDATE, WEIGHTS
from rlframework.conformance.report import machine, plain
from rlframework.conformance.sections import parse_section
from rlframework.files import write_atomically

if TYPE_CHECKING:
    from rlframework.conformance.measure import Measurement
    from rlframework.conformance.parity.outcome import Outcome

FORMAT = 1
"""Version of the JSON's form."""

HEADS = (
    "backend", "layout", "precision", "loss", "log-probs max", "mean", "loss err", "grad norm", "weights",
    "update", "worst tensor", "verdict",
)  # fmt: skip
FIGURES = ("log-probabilities", "mean of log-probabilities", "loss", "gradient norm", "weights", "update")


def print_outcomes(outcomes: Sequence[Outcome], title: str) -> None:
    """A table on stdout, in plain columns where that is no terminal; then what there is to say of each row."""
    from rich.console import Console
    from rich.table import Table

    rows = [_cells(outcome) for outcome in outcomes]
    console = Console()
    if console.is_terminal:
        table = Table(*HEADS, title=title)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    else:
        print(title)
        print("\n".join(_aligned([HEADS, *rows])))
    for line in notes(outcomes):
        print(line)


def _cells(outcome: Outcome) -> tuple[str, ...]:
    subject = outcome.subject
    name = f"the run ({subject.backend})" if outcome.is_run else subject.backend
    figures = tuple(_figure(outcome, quantity) for quantity in FIGURES)
    worst = outcome.measurements.get("tensor")
    tensor = "" if worst is None else f"{_figure(outcome, 'tensor')} {worst.quantity}"
    exam = outcome.exam if outcome.made else "-"
    return (name, subject.how, subject.precision, exam, *figures, tensor, outcome.verdict)


def _figure(outcome: Outcome, quantity: str) -> str:
    """The error: in brackets where it has no verdict, with an exclamation mark where it is beyond its tolerance."""
    found = outcome.measurements.get(quantity)
    if found is None:
        return "-"
    text = f"{found.error:.1e}" if found.error else "0"
    if quantity not in outcome.judged:
        return f"({text})"
    return text if found.holds else f"{text} !"


def _aligned(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def notes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """What a table has no room for: the legend, what was not available, where each parts, differences to the run."""
    if any(len(outcome.judged) < len(outcome.measurements) for outcome in outcomes):
        yield (
            "(in brackets): told without a verdict. In other precisions than float32 only the mean error of "
            f"log-probabilities is held to something: {BF16:g}"
        )
    for outcome in outcomes:
        exam = f", {outcome.exam}" if outcome.made else ""
        who = f"{'the run, ' if outcome.is_run else ''}{outcome.subject}{exam}"
        if outcome.reason:
            yield f"{who}: {outcome.verdict}: {outcome.reason}"
        if outcome.fails and outcome.measurements and not outcome.is_run:
            yield f"{who}: {outcome.divergence or 'nothing parts within a step: the difference grows slowly'}"
        if WEIGHTS in outcome.measurements and UPDATE not in outcome.measurements:
            yield f"{who}: the steps changed less than the weights are rounded by, so nothing is said of the update"
        if outcome.against_run:
            told = "; ".join(f"{name} {found.error:.1e}" for name, found in outcome.against_run.items())
            yield f"{who}, beside what the run saw: {told}"


def tolerances(slack: float) -> dict[str, float]:
    """What holds in fp32, and for log-probabilities in other precisions."""
    return {
        "float32": FP32,
        "loss and gradient norm after the first step": AFTER_STEPS,
        "weights": WEIGHTS_AFTER_20_STEPS * slack,
        "update": update.LIMIT,
        "tensor": TENSOR_AFTER_20_STEPS * slack,
        "other precisions, mean of log-probabilities": BF16,
    }


def as_json(outcomes: Sequence[Outcome], settings: Mapping[str, Any], slack: float) -> dict[str, Any]:
    """Everything, with the machine and the versions."""
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rlframework": rlframework.__version__,
        "machine": machine(any(outcome.subject.device == "cuda" for outcome in outcomes if not outcome.is_run)),
        "settings": dict(settings),
        "tolerances": tolerances(slack),
        "outcomes": [_outcome_json(outcome) for outcome in outcomes],
    }


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write it to `path`, whole or not at all."""
    write_atomically(path, json.dumps(plain(content), indent=1, allow_nan=False) + "\n")


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    subject = outcome.subject
    divergence = outcome.divergence
    return {
        "backend": subject.backend,
        "layout": str(subject.layout),
        "section": parse_section(subject.keys),
        "precision": subject.precision,
        "device": subject.device,
        "loss": outcome.exam,
        "is_run": outcome.is_run,
        "verdict": outcome.verdict,
        "reason": outcome.reason,
        "measurements": {
            name: _measured(found, name in outcome.judged) for name, found in outcome.measurements.items()
        },
        "against_run": {name: _measured(found, False) for name, found in outcome.against_run.items()},
        "parting": None if divergence is None else {**asdict(divergence), "text": str(divergence)},
        "seconds": round(outcome.seconds, 2),
    }


def _measured(found: Measurement, judged: bool) -> dict[str, Any]:
    values = asdict(found)
    if not judged:
        values["tolerance"] = None
    return values
