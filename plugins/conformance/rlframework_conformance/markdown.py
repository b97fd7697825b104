"""Markdown of conformance reports: verdicts, declared capabilities, and the largest measured errors.

    python -m rlframework_conformance.markdown REPORT.json [...] TABLE.md
    python -m rlframework_conformance.markdown --shorten REPORT.json SHORT.json

The page is built from the JSON alone, so that both always agree. A shortened report gives the same page: it omits the
thousands of single measurements and keeps the largest of each contract.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlframework.base.errors import DataError, UserError
from rlframework.base.files import write_atomically
from rlframework.plugins.types import Capability
from rlframework_conformance.contracts import CONTRACTS
from rlframework_conformance.report import FORMAT

Row = Sequence[str]
_MEANING = """For each contract, the errors relative to the oracle or to values computed by hand: the largest error, and
the one nearest to its tolerance. `0` means equal values."""


def markdown_of(paths: Sequence[str | Path]) -> str:
    """Return the page of the reports in `paths`."""
    return markdown([read(path) for path in paths])


def read(path: str | Path) -> dict[str, Any]:
    """Read a report written by `report.write_json`; raises a `DataError` for anything else."""
    try:
        report = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DataError(f"{path} cannot be read as a conformance report: {error}") from None
    found = report.get("format") if isinstance(report, dict) else None
    if found != FORMAT:
        raise DataError(f"{path} is a conformance report of format {found!r}; this version reads format {FORMAT}")
    return dict(report)


def shortened(report: Mapping[str, Any]) -> dict[str, Any]:
    """Return `report` without single measurements, keeping everything that `markdown` reads."""
    verdicts = [
        {**verdict, "tests": [{**test, "measurements": len(test["measurements"])} for test in verdict["tests"]]}
        for verdict in report["verdicts"]
    ]
    return {**report, "verdicts": verdicts}


def markdown(reports: Sequence[Mapping[str, Any]]) -> str:
    """Return the page of `reports`."""
    verdicts = [verdict for report in reports for verdict in report["verdicts"]]
    parts = ["# Conformance", *map(_ran_on, reports), "## Verdicts", _verdicts(verdicts)]
    if capabilities := _capabilities(verdicts):
        parts += ["## What the backends declare", capabilities]
    if errors := list(_errors(verdicts)):
        parts += ["## The largest errors measured", _MEANING, *errors]
    return "\n\n".join(parts) + "\n"


def _ran_on(report: Mapping[str, Any]) -> str:
    machine = report["machine"]
    gpu = "" if machine["device"] == "cpu" else f", {machine['device']}"
    return (
        f"Run on {report['date'][:10]}: {machine['cpu']}, {machine['cores']} cores{gpu}; Python {machine['python']}, "
        f"torch {machine['torch']}, transformers {machine['transformers']}."
    )


def _verdicts(verdicts: Iterable[Mapping[str, Any]]) -> str:
    rows = []
    for verdict in verdicts:
        counts, missing, undeclared = verdict["counts"], len(verdict["missing"]), len(verdict["undeclared"])
        numbers = {
            "passed": counts["passed"],
            "failed": counts["failed"],
            "errors": counts["error"],
            "known failures": counts["known_failure"],
            "did not run": missing,
            "not declared": undeclared,
        }
        counts_text = ", ".join(f"{number} {name}" for name, number in numbers.items() if number) or "none"
        who = verdict["backend"], verdict["version"], _how(verdict), verdict["device"]
        rows.append((*who, verdict["suite"], verdict["verdict"], counts_text))
    return _table(("backend", "version", "layout", "device", "suite", "verdict", "tests"), rows)


def _how(verdict: Mapping[str, Any]) -> str:
    """Return the layout and the keys of the plugin's own section; older reports do not record the latter."""
    return f"{verdict['layout']} {verdict.get('section', '')}".strip() or "-"


def _capabilities(verdicts: Iterable[Mapping[str, Any]]) -> str:
    """Return a table of capabilities by plugin, for plugins that declare any; one test in any report is enough."""
    declared: dict[str, set[str]] = {}
    tested: dict[str, set[str]] = {}
    for verdict in verdicts:
        if capabilities := set(verdict["capabilities"]):
            part = f"{verdict['backend']}, {verdict['kind'].replace('_', ' ')}"
            declared.setdefault(part, set()).update(capabilities)
            tested.setdefault(part, set()).update(capabilities.difference(verdict["untested"]))
    rows = [
        (str(capability).replace("_", " "), *(_declares(capability, declared[part], tested[part]) for part in declared))
        for capability in Capability
    ]
    return _table(("capability", *declared), rows) if declared else ""


def _declares(capability: Capability, declared: set[str], tested: set[str]) -> str:
    if capability not in declared:
        return "no"
    return "yes" if capability in tested else "declared, untested"


def _errors(verdicts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield a title and a table for each contract."""
    for number, contract in CONTRACTS.items():
        found = [(verdict, verdict["contracts"].get(str(number))) for verdict in verdicts]
        rows = [
            (
                verdict["backend"],
                _how(verdict),
                verdict["device"],
                str(errors["measurements"]),
                _error(errors["largest"]),
                _error(errors["nearest_to_tolerance"]),
                errors["nearest_to_tolerance"]["quantity"],
            )
            for verdict, errors in found
            if errors is not None
        ]
        if rows:
            yield f"### {number}: {contract}"
            head = (
                "backend",
                "layout",
                "device",
                "measured",
                "largest (allowed)",
                "nearest to its limit (allowed)",
                "which is",
            )
            yield _table(head, rows)


def _error(measurement: Mapping[str, Any]) -> str:
    return f"{_number(measurement['error'])} ({_number(measurement['tolerance'])})"


def _number(value: Any) -> str:
    return "0" if float(value) == 0 else f"{float(value):.2g}"


def _table(head: Row, rows: Iterable[Row]) -> str:
    cells = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in cells)


def main(args: Sequence[str]) -> None:
    """Write the page of all reports except the last argument, which is the page; or write a shortened report."""
    if len(args) < 2:
        sys.exit(
            "usage: python -m rlframework_conformance.markdown [--shorten] REPORT.json [...] TABLE.md or SHORT.json"
        )
    try:
        if args[0] == "--shorten" and len(args) == 3:
            write_atomically(args[2], json.dumps(shortened(read(args[1])), indent=1, allow_nan=False) + "\n")
            return
        write_atomically(args[-1], markdown_of(args[:-1]))
    except UserError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main(sys.argv[1:])
