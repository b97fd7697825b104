"""Rows without a value in a column that a reward function asks for: counted at the start, reported in a warning."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from rlframework.datasets.sources.rows import Rows


class EmptyColumns:
    """Counts, by column, those of `rows` that have no value in it."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._found: dict[str, list[int]] = {}

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        """Count the row `number`, which has `values` in the columns that are asked for."""
        for name, value in values.items():
            if self._rows.is_empty(number, value):
                self._found.setdefault(name, []).append(number)

    def warnings(self, columns: Collection[str], checked: int, source: str) -> Iterator[str]:
        """Yield a warning for each of `columns`, those of the data, that has no value in some of the `checked` rows."""
        for name in (name for name in self._found if name in columns):
            numbers = self._found[name]
            yield (
                f"{len(numbers)} of the {checked} rows that were read of {source} have no value in the column "
                f"{name!r}, which environment.reward asks for; the first is {self._rows.where(numbers[0])}. The "
                "function gets None for them, or an empty text: fill the column, or remove these rows, unless the "
                "function handles that"
            )
