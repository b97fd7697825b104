"""The output of `rlframework doctor`, as a table or as JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import TYPE_CHECKING

from rlframework import __version__
from rlframework.doctor.findings import Level

if TYPE_CHECKING:
    from rich.table import Table

    from rlframework.doctor.check_runner import Examination

COLOURS = {
    Level.OK: "green",
    Level.NOTE: "cyan",
    Level.UNKNOWN: "magenta",
    Level.WARNING: "yellow",
    Level.BROKEN: "bold red",
}


def as_json(examination: Examination) -> str:
    """Return a JSON object with `version`, `exit_code` and `findings`, a list with the fields of `Finding`."""
    found = [asdict(finding) for finding in examination.findings]
    values = {"version": __version__, "exit_code": examination.exit_code, "findings": found}
    return json.dumps(values, indent=2, ensure_ascii=False)


def as_table(examination: Examination) -> Table:
    """Return a table with one row per finding, its remedy below its description."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=False)
    for title in ("about", "check", "state"):
        table.add_column(title, no_wrap=True)
    table.add_column("finding and remedy", overflow="fold")
    topic = ""
    for finding in examination.findings:
        if topic and finding.topic != topic:
            table.add_section()
        shown = finding.topic if finding.topic != topic else ""
        topic = finding.topic
        text = Text(finding.text)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", style="bold")
        table.add_row(shown, finding.name, Text(finding.level, style=COLOURS[finding.level]), text)
    return table


def summary(examination: Examination) -> str:
    """Return the last line of the output."""
    counts = Counter(finding.level for finding in examination.findings)
    parts = [f"{counts[level]} {level}" for level in reversed(Level) if counts[level] and level is not Level.NOTE]
    if examination.exit_code:
        verdict = "this run will fail" if examination.of_run else "something is broken"
    else:
        verdict = "this run can start" if examination.of_run else "nothing is broken"
    return f"{verdict}: {', '.join(parts)}"
