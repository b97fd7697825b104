"""`Rows`, the interface of every source of data: `JsonlRows` of JSON lines, `ArrowRows` of Arrow and Parquet.

A JSON-lines file is scanned once for the offsets of its lines, 8 bytes per row, and stays open; a row is read on
access. The readers of `datasets` and pyarrow convert a file to Arrow first: they know no line numbers, and reject rows
of different types. A row of an Arrow table is taken from its record batch: slicing a `pyarrow.Table` searches all
batches, and `datasets` adds formatting and a cache on disk. Columns are not decoded into images or audio.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import tempfile
import weakref
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from rlframework.base.errors import DataError

if TYPE_CHECKING:
    import pyarrow as pa

Row = dict[str, Any]
"""One row: plain Python values by column."""

_REASON = 300
"""Characters of another library's message to include in an error."""

_SPACE = b" \t\r\n"
_MARK = b"\xef\xbb\xbf"
_DAMAGED = "cannot be read because the file is damaged"
_NOT_PARQUET = "is missing, damaged, or not a Parquet file that fits the others"

_BATCH = 1024
"""Number of rows of a Parquet file to unpack at a time."""


class Rows(ABC):
    """Rows, numbered from 0, that are read on access. Reading a damaged row raises a `DataError` that names it."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Row: ...

    def __iter__(self) -> Iterator[Row]:
        return map(self.__getitem__, range(len(self)))

    @abstractmethod
    def where(self, index: int) -> str:
        """The location of row `index` for messages, such as `train.jsonl, line 7`."""

    @abstractmethod
    def label(self, index: int) -> str:
        """A short name of row `index`, such as `train-7`."""

    def is_empty(self, index: int, value: Any) -> bool:
        """Whether `value`, of a column of row `index`, stands for none."""
        return value is None

    @abstractmethod
    def sizes(self) -> npt.NDArray[np.int64]:
        """Approximate bytes of text of each row, `[n]` int64, without reading the text; to find the longest rows."""


class JoinedRows(Rows):
    """The rows of several sources by name, in order."""

    def __init__(self, sources: Mapping[str, Rows]) -> None:
        self._names, self._rows = list(sources), list(sources.values())
        self.starts: list[int] = np.cumsum([0, *map(len, self._rows)]).tolist()
        """The number of the first row of each source, and the number of all rows."""

    def __len__(self) -> int:
        return self.starts[-1]

    def __getitem__(self, index: int) -> Row:
        source, row = self._find(index)
        return self._rows[source][row]

    def where(self, index: int) -> str:
        """See `Rows.where`: as the source says."""
        source, row = self._find(index)
        return self._rows[source].where(row)

    def label(self, index: int) -> str:
        """The name of the source, and its label of the row."""
        source, row = self._find(index)
        return f"{self._names[source]}/{self._rows[source].label(row)}"

    def is_empty(self, index: int, value: Any) -> bool:
        """See `Rows.is_empty`: as the source says."""
        source, row = self._find(index)
        return self._rows[source].is_empty(row, value)

    def sizes(self) -> npt.NDArray[np.int64]:
        """See `Rows.sizes`."""
        return np.concatenate([rows.sizes() for rows in self._rows])

    def _find(self, index: int) -> tuple[int, int]:
        source = bisect_right(self.starts, index) - 1
        return source, index - self.starts[source]


class JsonlRows(Rows):
    """The objects of JSON-lines files in order; blank lines are skipped.

    Raises a `DataError` on opening for a file that is missing or empty, and on reading for a line that is not UTF-8 or
    not a JSON object, or a file that has changed since it was opened.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._files = [_File(Path(path)) for path in paths]
        self._starts: list[int] = np.cumsum([0, *(len(file.starts) for file in self._files)]).tolist()

    def __len__(self) -> int:
        return self._starts[-1]

    def where(self, index: int) -> str:
        """The file and the line, counted from 1."""
        file, row = self._find(index)
        return f"{file.path}, line {file.number(row)}"

    def label(self, index: int) -> str:
        """See `Rows.label`."""
        file, row = self._find(index)
        return f"{file.path.stem}-{file.number(row)}"

    def sizes(self) -> npt.NDArray[np.int64]:
        """See `Rows.sizes`: the bytes of the lines."""
        return np.concatenate([np.diff(np.array(file.starts), append=file.size) for file in self._files])

    def __getitem__(self, index: int) -> Row:
        file, row = self._find(index)
        raw = file.line(row)
        if raw is None:
            raise DataError(f"{self.where(index)}: the file has changed since it was opened; start the run again")
        array_hint = ". Convert a file with one array by `jq -c '.[]' in.json > out.jsonl`"
        hint = array_hint if raw.lstrip()[:1] == b"[" else ""
        try:
            found = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(index)}: not UTF-8 text ({error.reason}); is it compressed?") from error
        except (ValueError, RecursionError) as error:  # ValueError alone: a number with thousands of digits
            why = f"{error.msg} at character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else error
            raise DataError(
                f"{self.where(index)}: not JSON ({why}); each line must be one JSON object{hint}"
            ) from error
        if not isinstance(found, dict):
            given = type(found).__name__
            raise DataError(f"{self.where(index)}: must be a JSON object with named fields, not {given}{hint}")
        return found

    def _find(self, index: int) -> tuple[_File, int]:
        number = bisect_right(self._starts, index) - 1
        return self._files[number], index - self._starts[number]


class _File:
    """An open file, the offsets of its non-blank lines, and for each blank line the number of the row after it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            if path.exists() and not path.is_file():  # opening a pipe would wait for its writer
                raise OSError(errno.EINVAL, "it is not a file")
            self._handle = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._handle)
            offset = len(_MARK) if os.pread(self._handle, len(_MARK), 0) == _MARK else 0
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise DataError(f"{path}: cannot be read ({reason}); give the path of a JSONL file") from error
        self._stamp = self._state()
        self.size = self._stamp[0]
        self.starts, self._blanks = array("q"), array("q")
        with open(self._handle, "rb", closefd=False) as file:
            file.seek(offset)
            for line in file:
                if line.strip(_SPACE):
                    self.starts.append(offset)
                else:
                    self._blanks.append(len(self.starts))
                offset += len(line)
        if not self.starts:
            raise DataError(f"{path}: the file is empty; it must hold one JSON object per line")

    def number(self, row: int) -> int:
        """The line number of `row`, counted from 1, including blank lines."""
        return row + 1 + bisect_right(self._blanks, row)

    def line(self, row: int) -> bytes | None:
        """The line of `row`, and blank lines after it, which JSON ignores; None if the file has changed."""
        start = self.starts[row]
        end = self.starts[row + 1] if row + 1 < len(self.starts) else self.size
        raw = os.pread(self._handle, end - start, start)
        return raw if self._state() == self._stamp and len(raw) == end - start else None

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._handle)
        return status.st_size, status.st_mtime_ns


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
        """The name of the file, and the row in it, as tables count them."""
        part, row = self._place(index)
        return f"{self._part_names[part]}, {counted_from_0(row)}"

    def label(self, index: int) -> str:
        """See `Rows.label`."""
        return f"{self._label}-{index}"

    def __getitem__(self, index: int) -> Row:
        number = bisect_right(self._ends, index) - 1
        batch = self._batches[number]
        try:
            if number in self._unchecked:
                batch.validate(full=True)
                self._unchecked.discard(number)
            rows: list[Row] = batch.slice(index - self._ends[number], 1).to_pylist()
        except Exception:
            with reading(f"{self.where(index)}: {_DAMAGED}"):
                raise
        return rows[0]

    def sizes(self) -> npt.NDArray[np.int64]:
        """See `Rows.sizes`: lengths of texts from their offsets, including those in lists and structs."""
        with reading(f"{self._part_names[0]}: {_DAMAGED}"):
            found = [sum(map(_bytes, batch.columns), np.zeros(batch.num_rows, np.int64)) for batch in self._batches]
        return np.concatenate([*found, np.zeros(0, np.int64)])

    def _place(self, index: int) -> tuple[int, int]:
        """The part of row `index`, and the number of the row in it."""
        part = bisect_right(self._part_starts, index) - 1
        return part, index - self._part_starts[part]


def read_parquet(paths: Sequence[Path], label: str) -> ArrowRows:
    """Return the rows of all files in order, memory-mapped.

    The rows are unpacked into an unnamed temporary file, which is freed with the table. Columns that a file lacks are
    null in its rows. Raises a `DataError` if a file is missing or damaged, if its columns do not fit the other files',
    or if there are no rows.
    """
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
    counts = dict.fromkeys(map(str, paths), 0)
    try:
        with tempfile.TemporaryFile() as file:
            with pa.ipc.new_stream(file, schema) as stream:
                for path in paths:
                    for batch in _batches(path, schema):
                        stream.write_batch(batch)
                        counts[str(path)] += batch.num_rows
            file.flush()
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        raise DataError(
            f"no space left in {tempfile.gettempdir()!r} to unpack the Parquet files; set TMPDIR to a directory with "
            "space for several times their size"
        ) from error
    if not any(counts.values()):
        raise DataError(f"{paths[0]}: the file has no rows; give one with rows")
    return ArrowRows(pa.ipc.open_stream(pa.py_buffer(content)).read_all(), [*counts.items()], label)


def _batches(path: Path, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """The rows of `path` with the columns of `schema`; `pyarrow.dataset` does this too, in twice the memory."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with reading(f"{path}: {_NOT_PARQUET}"), pq.ParquetFile(path) as file:
        for batch in file.iter_batches(batch_size=_BATCH):
            given = pa.Table.from_batches([batch]).replace_schema_metadata()
            yield from pa.concat_tables([schema.empty_table(), given], promote_options="permissive").to_batches()


def _bytes(array: pa.Array) -> npt.NDArray[np.int64]:
    """Bytes of text in each element of `array`, from offsets alone; other values count as 0."""
    import pyarrow as pa
    import pyarrow.compute as pc

    kind = array.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        lengths = pc.fill_null(pc.binary_length(array), 0)
        return np.asarray(lengths.to_numpy(zero_copy_only=False), np.int64)
    if pa.types.is_struct(kind):
        return sum((_bytes(child) for child in array.flatten()), np.zeros(len(array), np.int64))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        total = np.concatenate([[0], np.cumsum(_bytes(array.values))])
        return np.asarray(np.diff(total[array.offsets.to_numpy()]), np.int64)
    return np.zeros(len(array), np.int64)


def counted_from_0(row: int) -> str:
    """Name a row of a table, which has no lines: `table[row]`."""
    return f"row {row} (counted from 0)"


def check_fields(row: Row, fields: Mapping[str, type], where: str) -> Row:
    """Return `row` if it has all `fields` of the given types; else raise a `DataError` that begins with `where`."""
    for name, kind in fields.items():
        if name not in row:
            raise DataError(f"{where}: the field {name!r} is missing; the fields are {sorted(row)}")
        if not isinstance(row[name], kind):
            raise DataError(f"{where}: the field {name!r} must be {kind.__name__}, not {type(row[name]).__name__}")
    return row


@contextmanager
def reading(what: str, remedy: str = "") -> Iterator[None]:
    """Raise a `DataError` for whatever another library raises: it may be anything if a file is damaged."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split()).rstrip(".") or type(error).__name__
        raise DataError(f"{what} ({reason[:_REASON]}). {remedy}".rstrip(". ")) from error
