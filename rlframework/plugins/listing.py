"""The rows of `rlframework plugins`, and their rendering as a table. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from rlframework.base.errors import UserError
from rlframework.plugins.discovery import did_you_mean
from rlframework.plugins.types import RECORD_TYPES

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType

COLOURS = {"active": "green", "disabled": "yellow", "broken": "red"}
WIDE = 160
"""Columns of a terminal from which the table shows capabilities."""
NARROW = 30
"""Columns that a name or an origin keeps before it is folded."""


@dataclass(frozen=True)
class PluginListing:
    """One record of a plugin, or a plugin without records (then `kind` and `api_version` are None).

    `status` is active, disabled or broken; `reason` explains a status other than active. `capabilities` are sorted.
    """

    name: str
    kind: str | None
    distribution: str
    version: str
    api_version: int | None
    capabilities: tuple[str, ...]
    status: str
    reason: str = ""
    summary: str = ""


def named(name: str, rows: Sequence[PluginListing]) -> list[PluginListing]:
    """Return the rows of the plugin or the kind `name`; raise a `UserError` if there are none."""
    found = [row for row in rows if name in (row.name, row.kind)]
    if not found:
        known = sorted({row.name for row in rows} | {row.kind for row in rows if row.kind})
        raise UserError(
            f"no plugin or kind is named {name!r}.{did_you_mean(name, known)} `rlframework plugins` lists all"
        )
    return found


class PluginTable:
    """A section of rows for each kind, headed by the configuration key that selects one, fitted to the terminal.

    Active plugins come first. A terminal narrower than `WIDE` has no room for the capabilities; a last line says where
    to see them.
    """

    def __init__(self, rows: Sequence[PluginListing]) -> None:
        self.rows = sorted(rows, key=lambda row: (row.kind or "~", row.status != "active", row.name))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        """Yield the sections for a console of `options.max_width` columns."""
        from rich.table import Table
        from rich.text import Text

        wide = options.max_width >= WIDE
        longest = [max(len(row.name) for row in self.rows) + 2, max(len(_origin(row)) for row in self.rows), 8]
        for kind, rows in groupby(self.rows, lambda row: row.kind):
            heading = f"{kind} ({RECORD_TYPES[kind].key})" if kind else "plugins without parts"
            yield Text(heading, style="bold")
            table = Table(box=None, show_header=False, expand=True, pad_edge=False, padding=(0, 2, 0, 0))
            for width in longest:
                table.add_column(min_width=min(width, NARROW), max_width=width, overflow="fold")
            table.add_column(ratio=2, overflow="fold")
            if wide:
                table.add_column(ratio=3, overflow="fold")
            for row in rows:
                status = Text(row.status, style=COLOURS[row.status])
                more = [row.reason or row.summary, *([", ".join(row.capabilities)] if wide else [])]
                table.add_row(Text(f"  {row.name}"), Text(_origin(row)), status, *map(Text, more))
            yield table
        if not wide and any(row.capabilities for row in self.rows):
            yield Text(f"Capabilities are shown with --json, or on a terminal of at least {WIDE} columns.", style="dim")


def _origin(row: PluginListing) -> str:
    return f"{row.distribution} {row.version}".strip()
