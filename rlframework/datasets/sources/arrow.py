"""Rows of memory-mapped Arrow tables, and Parquet files as such tables, for random access to data larger than memory.

A row is taken from its record batch: slicing a `pyarrow.Table` searches all batches, and `datasets` adds formatting and
a cache on disk. Columns are not decoded into images or audio: a row holds plain Python values.
"""

from __future__ import annotations

import errno
import mmap
import tempfile
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

import numpy as np
import numpy.typing as npt

from rlframework.datasets.sources.rows import Row, Rows, reading, unreadable
from rlframework.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

_DAMAGED = "cannot be read because the file is damaged"
_NOT_PARQUET = "is missing, damaged, or not a Parquet file that fits the others"

_BATCH = 1024
"""Number of rows of a Parquet file to unpack at a time."""


class ArrowRows(Rows):
    """The rows of an Arrow table. `parts` are the name and number of rows of each file it was joined from.

    Each record batch is validated when it is first read, so that a damaged memory-mapped file raises a `DataError`
    instead of killing the process.
    """

    def __init__(self, table: pa.Table, parts: Sequence[tuple[str, int]], label: str) -> None:
        self._part_names = [name for name, _ in parts]
        self._part_starts = np.cumsum([0, *(rows for _, rows in parts)]).tolist()
        self._label = label
        with reading(f"{self._part_names[0]}: {_DAMAGED}"):
            table.validate()  # row counts and buffer positions only
        self._batches: list[pa.RecordBatch] = table.to_batches()
        self._ends = np.cumsum([0, *(batch.num_rows for batch in self._batches)]).tolist()
        self._unchecked = set(range(len(self._batches)))

    def __len__(self) -> int:
        return int(self._ends[-1])

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
        except Exception as error:
            raise unreadable(f"{self.where(index)}: {_DAMAGED}", error) from error
        return rows[0]

    def sizes(self) -> npt.NDArray[np.int64]:
        """See `Rows.sizes`: lengths of texts from their offsets, including those in lists and structs."""
        with reading(f"{self._part_names[0]}: {_DAMAGED}"):
            found = [sum(map(_bytes, batch.columns), _zeros(batch.num_rows)) for batch in self._batches]
        return np.concatenate([*found, _zeros(0)])


def read_parquet(paths: Sequence[Path], label: str) -> ArrowRows:
    """Return the rows of all files in order, memory-mapped.

    The rows are unpacked into an unnamed temporary file, which is freed with the table. Columns that a file lacks are
    null in its rows. Raises a `DataError` if a file is missing or damaged, if its columns do not fit the other files',
    or if there are no rows.
    """
    import pyarrow as pa

    schema = _common_schema(paths)
    parts = []
    with _temporary_file() as file:
        with pa.ipc.new_stream(file, schema) as stream:
            for path in paths:
                rows = 0
                for batch in _batches(path, schema):
                    stream.write_batch(batch)
                    rows += batch.num_rows
                parts.append((str(path), rows))
        file.flush()
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    if not any(rows for _, rows in parts):
        raise DataError(f"{paths[0]}: the file has no rows; give one with rows")
    return ArrowRows(pa.ipc.open_stream(pa.py_buffer(content)).read_all(), parts, label)


def _common_schema(paths: Sequence[Path]) -> pa.Schema:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([])
    for path in paths:
        with reading(f"{path}: {_NOT_PARQUET}"):
            found = pq.read_schema(path).remove_metadata()
        try:
            schema = pa.unify_schemas([schema, found], promote_options="permissive")
        except pa.ArrowException as error:
            raise DataError(
                f"{path}: its columns do not fit those of {paths[0]} ({error}); give files with the same columns"
            ) from error
    return schema


def _batches(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of `path` with the columns of `schema`; `pyarrow.dataset` does this too, in twice the memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with reading(f"{path}: {_NOT_PARQUET}"), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH):
            given = batch.schema.names
            columns = [
                batch[field.name].cast(field.type) if field.name in given else pa.nulls(batch.num_rows, field.type)
                for field in schema
            ]
            yield pa.record_batch(columns, schema=schema)


@contextmanager
def _temporary_file() -> Iterator[BinaryIO]:
    """Open an unnamed temporary file, whose content exists while it is mapped."""
    try:
        with tempfile.TemporaryFile() as file:
            yield cast("BinaryIO", file)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"no space left in {tempfile.gettempdir()!r} to unpack the Parquet files; set TMPDIR to a directory with "
            "space for several times their size"
        ) from error


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
