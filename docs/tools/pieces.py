"""Pieces of Markdown that the generated pages share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MADE = "<!-- Made by docs/tools/pages.py: edits here are lost. -->"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table. A `|` in a cell would be read in different ways on the site and where the repository is hosted."""
    lines = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
    for row in rows:
        if len(row) != len(head) or any("|" in cell or "\n" in cell for cell in row):
            raise ValueError(f"no row of a table with {len(head)} columns: {row}")
        lines.append(f"| {' | '.join(row)} |")
    return "\n".join(lines)


def page(*parts: str) -> str:
    """A page of these parts, which says on top that it is made."""
    return "\n\n".join([MADE, *(part.strip("\n") for part in parts)]) + "\n"
