"""`CsvRows`, the rows of CSV files: pyarrow reads the values, Python's reader gives the line where each row begins."""

from __future__ import annotations

import csv
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import DataError
from rlframework.datasets.sources.rows import ArrowRows, reading

if TYPE_CHECKING:
    import pyarrow as pa


class CsvRows(ArrowRows):
    """The rows of `files`, named by their lines. `lines` has those of the rows of each file, or None if not known."""

    def __init__(
        self, table: pa.Table, files: Sequence[tuple[Path, int]], label: str, lines: Sequence[array[int] | None]
    ) -> None:
        super().__init__(table, [(str(path), rows) for path, rows in files], label)
        self._stems = [path.stem for path, _ in files]
        self._lines = lines

    def where(self, index: int) -> str:
        """The file and the line on which the row begins, counted from 1, the header included."""
        part, row = self._place(index)
        lines = self._lines[part]
        place = f"row {row + 1} (counted from 1, without the header)" if lines is None else f"line {lines[row]}"
        return f"{self._part_names[part]}, {place}"

    def label(self, index: int) -> str:
        """See `Rows.label`."""
        part, row = self._place(index)
        lines = self._lines[part]
        return super().label(index) if lines is None else f"{self._stems[part]}-{lines[row]}"

    def is_empty(self, index: int, value: Any) -> bool:
        """See `Rows.is_empty`: an empty cell is an empty text."""
        return value is None or value == ""


def read_csv(paths: Sequence[Path], label: str) -> CsvRows:
    """Return the rows of all files in order, in memory. The first line has the names of columns; all values are text.

    Values are separated by commas, in a `.tsv` by tabs. Columns that a file lacks are null in its rows. Raises a
    `DataError` if a file is missing or damaged, or if there are no rows.
    """
    import pyarrow as pa

    tables, lines = [], []
    for path in paths:
        delimiter = "\t" if path.suffix == ".tsv" else ","
        with reading(f"{path}: cannot be read as CSV, whose first line has the names of columns, in UTF-8"):
            tables.append(_table(path, delimiter))
            lines.append(_lines(path, delimiter, tables[-1].num_rows))
    if not any(table.num_rows for table in tables):
        raise DataError(f"{paths[0]}: the file has no rows; give one with rows")
    files = [(path, table.num_rows) for path, table in zip(paths, tables, strict=True)]
    return CsvRows(pa.concat_tables(tables, promote_options="permissive"), files, label, lines)


def _table(path: Path, delimiter: str) -> pa.Table:
    import pyarrow as pa
    import pyarrow.csv as pc

    with path.open(encoding="utf-8-sig", newline="") as file:
        names = next(csv.reader(file, delimiter=delimiter), [])
    if len(set(names)) < len(names):
        raise DataError(f"{path}: two columns have one name: {names}")
    # no guessing: 007 stays 007, and an empty value is an empty text
    convert = pc.ConvertOptions(column_types=dict.fromkeys(names, pa.string()), strings_can_be_null=False)
    parse = pc.ParseOptions(delimiter=delimiter, newlines_in_values=True)
    return pc.read_csv(path, parse_options=parse, convert_options=convert)


def _lines(path: Path, delimiter: str, rows: int) -> array[int] | None:
    """The line on which each of the `rows` begins; None if Python's reader finds other rows, or too long a value."""
    found, last = array("q"), 0
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file, delimiter=delimiter)
        try:
            for values in reader:
                if values:  # not a blank line
                    found.append(last + 1)
                last = reader.line_num
        except csv.Error:
            return None
    return found[1:] if len(found) == rows + 1 else None
