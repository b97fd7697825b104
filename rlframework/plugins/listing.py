"""What `rlframework plugins [--json]` shows: the rows, and the two ways to print them. Imports no torch."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlframework.plugins.types import Record

if TYPE_CHECKING:
    from rich.table import Table

    from rlframework.plugins.loading import Source

COLOURS = {"active": "green", "disabled": "yellow", "broken": "red"}


@dataclass(frozen=True)
class PluginListing:
    """One record of a plugin, or a plugin without records (`kind` and `api_version` are None).

    `status` is active, disabled or broken; `reason` says why it is not active. `capabilities` are sorted.
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

    @classmethod
    def of_record(cls, record: Record, source: Source, status: str, reason: str) -> PluginListing:
        """The row of one record."""
        return cls(
            name=record.name,
            kind=record.kind,
            distribution=source.distribution,
            version=source.version,
            api_version=record.api_version,
            capabilities=tuple(sorted(str(capability) for capability in record.capabilities)),
            status=status,
            reason=reason,
            summary=record.summary,
        )


def as_json(rows: Sequence[PluginListing]) -> str:
    """A JSON list with one object a row; the keys are the fields of `PluginListing`."""
    return json.dumps([dataclasses.asdict(row) for row in rows], indent=2)


def as_table(rows: Sequence[PluginListing]) -> Table:
    """A table for the terminal, active plugins first within each kind."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_lines=False)
    for title in ("kind", "name", "distribution", "version", "API", "status", "capabilities, or why not"):
        table.add_column(title, overflow="fold")
    for row in sorted(rows, key=lambda row: (row.kind or "~", row.status != "active", row.name)):
        api = "" if row.api_version is None else str(row.api_version)
        cells = (row.kind or "-", row.name, row.distribution, row.version, api)
        status = Text(row.status, style=COLOURS[row.status])
        table.add_row(*map(Text, cells), status, Text(row.reason or ", ".join(row.capabilities)))
    return table
