"""Reports of `rlframework parity`: a table, notes below it, and JSON."""

from __future__ import annotations

import json
import re
import shutil
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

import rlframework
from rlframework.base.files import write_atomically
from rlframework_conformance.contracts import BF16, FP32, TENSOR_AFTER_20_STEPS, WEIGHTS_AFTER_20_STEPS
from rlframework_conformance.parity import update
from rlframework_conformance.parity.outcome import (
    AFTER_STEPS,
    LOGPROBS,
    LOSS,
    MEAN,
    NORM,
    TENSOR,
    UPDATE,
    WEIGHTS,
)
from rlframework_conformance.report import machine, plain
from rlframework_conformance.sections import parse_section

if TYPE_CHECKING:
    from rlframework_conformance.measure import Measurement
    from rlframework_conformance.parity.outcome import Outcome

FORMAT = 1
"""Version of the JSON format."""

WIDTH = 100
"""Characters per line where neither `COLUMNS` nor a terminal sets the width."""

NAMES = {"backend": 9, "layout": 8, "precision": 9, "case": 7}
"""Headings of the columns of names, and the width below which a column is not wrapped."""
FIGURES = {
    LOGPROBS: "logp",
    MEAN: "mean",
    LOSS: "loss",
    NORM: "norm",
    WEIGHTS: "weights",
    UPDATE: "update",
}
"""Quantities with a column of the table, and its heading."""
HEADINGS = (*NAMES, *FIGURES.values(), "result")


def print_outcomes(outcomes: Sequence[Outcome], title: str) -> None:
    """Print the table and the notes below it on stdout, wrapped to the terminal's width."""
    width = shutil.get_terminal_size((WIDTH, 24)).columns
    print(_filled(title, width))
    print("\n".join(table([_cells(outcome) for outcome in outcomes], width)))
    for note in notes(outcomes):
        print(_filled(note, width))


def _filled(text: str, width: int) -> str:
    """Wrap text between words; paths stay whole."""
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


# -- the table ---------------------------------------------------------------------------------------------------------


def table(rows: Sequence[Sequence[str]], width: int) -> Iterator[str]:
    """Yield the lines of the table; figures are right-aligned, and names are wrapped if a line would exceed `width`."""
    widths, gap = _widths([HEADINGS, *rows], width)
    for row in (HEADINGS, *rows):
        cells = [cell.rjust(size) for cell, size in zip(row, widths, strict=True)]
        figures = (" " * gap).join(cells[len(NAMES) : -1])
        names = [_wrapped(cell, size) for cell, size in zip(row[: len(NAMES)], widths, strict=False)]
        for number, parts in enumerate(zip_longest(*names, fillvalue="")):
            line = "  ".join(part.ljust(size) for part, size in zip(parts, widths, strict=False))
            yield (f"{line}  {figures}  {row[-1]}" if number == 0 else line).rstrip()


def _widths(rows: Sequence[Sequence[str]], width: int) -> tuple[list[int], int]:
    """Return the column widths and the gap between figures; narrows the gap, then the widest names, to fit."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    excess = sum(widths) + 2 * len(NAMES) + 2 * len(FIGURES) - width
    if excess <= 0:
        return widths, 2
    for _ in range(excess - (len(FIGURES) - 1)):
        wide = [column for column, narrowest in enumerate(NAMES.values()) if widths[column] > narrowest]
        if wide:
            widths[max(wide, key=lambda column: widths[column])] -= 1
    return widths, 1


def _wrapped(text: str, width: int) -> list[str]:
    """Split a name into lines, after commas, slashes and spaces where possible."""
    lines = [""]
    for piece in re.findall(r"[^,/ ]*[,/ ]|[^,/ ]+", text):
        if lines[-1] and len(lines[-1] + piece.rstrip()) > width:
            lines.append("")
        lines[-1] += piece
    return [line[start : start + width] for line in map(str.rstrip, lines) for start in range(0, len(line), width)]


def _cells(outcome: Outcome) -> tuple[str, ...]:
    candidate = outcome.candidate
    name = f"the run ({candidate.backend})" if outcome.is_run else candidate.backend
    scenario = outcome.scenario if outcome.built else "-"
    figures = tuple(_figure(outcome, quantity) for quantity in FIGURES)
    verdict = "absent" if outcome.verdict == "not available" else outcome.verdict
    return (name, candidate.layout_and_keys, candidate.precision, scenario, *figures, verdict)


def _figure(outcome: Outcome, quantity: str) -> str:
    """Format an error: in brackets if it is not checked, with an exclamation mark if it exceeds its tolerance."""
    found = outcome.measurements.get(quantity)
    if found is None:
        return "-"
    text = _number(found.error)
    if quantity not in outcome.checked:
        return f"({text})"
    return text if found.holds else f"{text}!"


def _number(error: float) -> str:
    """Format an error with two digits: `8.4e-7`."""
    return re.sub(r"e([+-])0+(?=\d)", r"e\1", f"{error:.1e}") if error else "0"


# -- the notes ---------------------------------------------------------------------------------------------------------


def notes(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """Yield the legend, reasons for missing figures, the first divergences, and differences from a recorded run."""
    if any(len(outcome.checked) < len(outcome.measurements) for outcome in outcomes):
        yield (
            "(in brackets): not checked. In precisions other than float32 only the mean error of log-probabilities is "
            f"checked, against {BF16:g}."
        )
    for outcome in outcomes:
        scenario = f", {outcome.scenario}" if outcome.built else ""
        name = f"{'the run, ' if outcome.is_run else ''}{outcome.candidate}{scenario}"
        for note in _notes_on(outcome):
            yield f"{name}: {note}"


def _notes_on(outcome: Outcome) -> Iterator[str]:
    if outcome.reason:
        yield f"{outcome.verdict}: {outcome.reason}"
    if TENSOR in outcome.beyond:
        worst = outcome.measurements[TENSOR]
        yield f"the worst tensor is {worst.quantity} (error {worst.error:.2g}, allowed {worst.tolerance:.2g})"
    if outcome.fails and outcome.measurements and not outcome.is_run:
        yield str(outcome.divergence or "no quantity diverges within one step: the difference grows slowly")
    if WEIGHTS in outcome.measurements and UPDATE not in outcome.measurements:
        yield "the steps changed the weights by less than their rounding, so the update could not be checked"
    if outcome.against_run:
        errors = "; ".join(f"{name} {found.error:.1e}" for name, found in outcome.against_run.items())
        yield f"compared with the run's own figures: {errors}"


# -- JSON --------------------------------------------------------------------------------------------------------------


def tolerances(slack: float) -> dict[str, float]:
    """Return the tolerances in fp32, and that of log-probabilities in other precisions."""
    return {
        "float32": FP32,
        "loss and gradient norm after the first step": AFTER_STEPS,
        "weights": WEIGHTS_AFTER_20_STEPS * slack,
        "update": update.LIMIT,
        "tensor": TENSOR_AFTER_20_STEPS * slack,
        "other precisions, mean of log-probabilities": BF16,
    }


def as_json(outcomes: Sequence[Outcome], settings: Mapping[str, Any], slack: float) -> dict[str, Any]:
    """Return all figures, with the machine and the versions."""
    return {
        "format": FORMAT,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "rlframework": rlframework.__version__,
        "machine": machine(any(outcome.candidate.device == "cuda" for outcome in outcomes if not outcome.is_run)),
        "settings": dict(settings),
        "tolerances": tolerances(slack),
        "outcomes": [_outcome_json(outcome) for outcome in outcomes],
    }


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Write `content` to `path` atomically."""
    write_atomically(path, json.dumps(plain(content), indent=1, allow_nan=False) + "\n")


def _outcome_json(outcome: Outcome) -> dict[str, Any]:
    candidate = outcome.candidate
    divergence = outcome.divergence
    return {
        "backend": candidate.backend,
        "layout": str(candidate.layout),
        "section": parse_section(candidate.keys),
        "precision": candidate.precision,
        "device": candidate.device,
        "loss": outcome.scenario,
        "is_run": outcome.is_run,
        "verdict": outcome.verdict,
        "reason": outcome.reason,
        "measurements": {
            name: _measurement_json(found, name in outcome.checked) for name, found in outcome.measurements.items()
        },
        "against_run": {name: _measurement_json(found, False) for name, found in outcome.against_run.items()},
        "parting": None if divergence is None else {**asdict(divergence), "text": str(divergence)},
        "seconds": round(outcome.seconds, 2),
    }


def _measurement_json(found: Measurement, checked: bool) -> dict[str, Any]:
    values = asdict(found)
    if not checked:
        values["tolerance"] = None
    return values
