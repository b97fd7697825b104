"""`Rows`, the interface of every source of data, and `ArrowRows` for memory-mapped Arrow tables.

Rows are read on access. JSON lines are in `jsonl`. Columns are not decoded into images or audio: a row holds plain
Python values.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, overload

import numpy as np

from rlframework.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt
    import pyarrow as pa

Row = dict[str, Any]
"""One row: plain Python values by column."""

DAMAGE = (ArithmeticError, AttributeError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""Exceptions of pyarrow and `datasets` on damaged files, which their readers do not validate."""


class Rows(Sequence[Row], ABC):
    """A sequence of rows that are read on access. Reading a damaged row raises a `DataError` that names it."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """The column names; for JSON lines, whose rows may differ, those of the first row."""

    @abstractmethod
    def where(self, index: int) -> str:
        """The location of row `index` (from 0) for messages, such as `train.jsonl, line 7`."""

    @abstractmethod
    def label(self, index: int) -> str:
        """A short name of row `index`, such as `train-7`."""

    @abstractmethod
    def sizes(self) -> npt.NDArray[np.int64]:
        """Approximate bytes of text of each row, `[n]` int64, without reading the text; to find the longest rows."""

    @abstractmethod
    def read(self, index: int) -> Row:
        """Return row `index`, with `0 <= index < len(self)`."""

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self.read(position) for position in range(*index.indices(len(self)))]
        return self.read(range(len(self))[index])


class ArrowRows(Rows):
    """The rows of an Arrow table. `parts` are the name and number of rows of each file it was joined from.

    With `check`, each record batch is validated when it is first read, so that a damaged memory-mapped file raises a
    `DataError` instead of killing the process.
    """

    def __init__(self, table: pa.Table, parts: Sequence[tuple[str, int]], label: str, *, check: bool) -> None:
        self._columns = tuple(table.column_names)
        if check:
            _validate(table, parts[0][0])
        self._batches: list[pa.RecordBatch] = table.to_batches()
        self._ends = np.cumsum([0, *(batch.num_rows for batch in self._batches)]).tolist()
        self._unchecked = set(range(len(self._batches))) if check else set()
        self._part_names = [name for name, _ in parts]
        self._part_starts = np.cumsum([0, *(rows for _, rows in parts)]).tolist()
        self._label = label

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def columns(self) -> tuple[str, ...]:
        """See `Rows.columns`."""
        return self._columns

    def where(self, index: int) -> str:
        """The name of the file, and the row in it, from 0."""
        part = bisect_right(self._part_starts, index) - 1
        return f"{self._part_names[part]}, row {index - self._part_starts[part]}"

    def label(self, index: int) -> str:
        """See `Rows.label`."""
        return f"{self._label}-{index}"

    def read(self, index: int) -> Row:
        """See `Rows.read`."""
        number = bisect_right(self._ends, index) - 1
        batch = self._batches[number]
        try:
            if number in self._unchecked:
                batch.validate(full=True)
                self._unchecked.discard(number)
            rows: list[Row] = batch.slice(index - self._ends[number], 1).to_pylist()
        except DAMAGE as error:
            raise DataError(f"{self.where(index)}: cannot be read because the file is damaged ({error})") from error
        return rows[0]

    def sizes(self) -> npt.NDArray[np.int64]:
        """See `Rows.sizes`: lengths of texts from their offsets, including those in lists and structs."""
        try:
            found = [sum(map(_bytes, batch.columns), _zeros(batch.num_rows)) for batch in self._batches]
        except DAMAGE as error:
            raise DataError(f"{self._part_names[0]}: cannot be read because the file is damaged ({error})") from error
        return np.concatenate([*found, _zeros(0)])


def _validate(table: pa.Table, where: str) -> None:
    """Run the cheap checks: row counts and buffer positions."""
    try:
        table.validate()
    except DAMAGE as error:
        raise DataError(f"{where}: cannot be read because the file is damaged ({error})") from error


def _zeros(rows: int) -> npt.NDArray[np.int64]:
    return np.zeros(rows, np.int64)


def _bytes(array: pa.Array) -> npt.NDArray[np.int64]:
    """Bytes of text in each element of `array`, from offsets alone; other values count as 0."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        lengths = pc.fill_null(pc.binary_length(array), 0)
        return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)
    if pa.types.is_struct(kind):
        return sum((_bytes(child) for child in array.flatten()), _zeros(len(array)))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        total = np.concatenate([[0], np.cumsum(_bytes(array.values))])
        return np.asarray(np.diff(total[array.offsets.to_numpy()]), np.int64)
    return _zeros(len(array))
