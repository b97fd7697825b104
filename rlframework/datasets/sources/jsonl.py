"""Read JSON-lines files row by row, with errors that name the file and the line.

A file is scanned once for the offsets of its lines, in chunks, and stays open; a row is read on access. Only the
offsets are kept in memory, 8 bytes per row.
"""

from __future__ import annotations

import json
import os
import weakref
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlframework.datasets.sources.rows import Row, Rows
from rlframework.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

_CHUNK = 1 << 24
"""Bytes to scan for line ends at a time."""

_SPACE = b" \t\r\n"
_MARK = b"\xef\xbb\xbf"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstandard", b"PK\x03\x04": "zip", b"BZh": "bzip2"}


def read_jsonl(path: Path, fields: Mapping[str, type]) -> list[tuple[int, dict[str, Any]]]:
    """Read all objects of the file with their line numbers, counted from 1; blank lines are skipped.

    Raises a `DataError` unless each is a JSON object with all `fields` of the given types, and for a file that is
    missing, not UTF-8 or without any object.
    """
    rows = JsonlRows([path])
    return [(rows.line(index), check_fields(row, fields, rows.where(index))) for index, row in enumerate(rows)]


def check_fields(row: Row, fields: Mapping[str, type], where: str) -> Row:
    """Return `row` if it has all `fields` of the given types; else raise a `DataError` that begins with `where`."""
    for name, kind in fields.items():
        if name not in row:
            raise DataError(f"{where}: the field {name!r} is missing; the fields are {sorted(row)}")
        if not isinstance(row[name], kind):
            raise DataError(f"{where}: the field {name!r} must be {kind.__name__}, not {type(row[name]).__name__}")
    return row


class JsonlRows(Rows):
    """The objects of JSON-lines files in order; blank lines are skipped.

    Raises a `DataError` on opening for a file that is missing, compressed or empty, and on reading for a line that is
    not UTF-8 or not a JSON object, or a file that has changed since it was opened.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._files = [_File(Path(path)) for path in paths]
        self._starts: list[int] = np.cumsum([0, *(len(file.starts) for file in self._files)]).tolist()
        self._columns: tuple[str, ...] | None = None

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def columns(self) -> tuple[str, ...]:
        """See `Rows.columns`."""
        if self._columns is None:
            self._columns = tuple(self.read(0))
        return self._columns

    def where(self, index: int) -> str:
        """The file and the line, counted from 1."""
        file, row = self._find(index)
        return file.where(row)

    def label(self, index: int) -> str:
        """See `Rows.label`."""
        file, row = self._find(index)
        return f"{file.path.stem}-{file.line(row)}"

    def line(self, index: int) -> int:
        """The line number of row `index` in its file, counted from 1."""
        file, row = self._find(index)
        return file.line(row)

    def sizes(self) -> npt.NDArray[np.int64]:
        """See `Rows.sizes`: the bytes of the lines."""
        return np.concatenate([np.diff(file.starts, append=file.size) for file in self._files])

    def read(self, index: int) -> Row:
        """See `Rows.read`."""
        file, row = self._find(index)
        return file.read(row)

    def _find(self, index: int) -> tuple[_File, int]:
        number = bisect_right(self._starts, index) - 1
        return self._files[number], index - self._starts[number]


class _File:
    """An open file and the offsets of its non-blank lines, `starts [rows]` int64."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._handle)
            head = os.pread(self._handle, 4, 0)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); give the path of a JSONL file") from error
        for sign, name in _COMPRESSED.items():
            if head.startswith(sign):
                raise DataError(f"{path}: is compressed ({name}); decompress it to one JSON object per line in UTF-8")
        self._stamp = self._state()
        self.size = self._stamp[0]
        self.starts, self._blanks = self._index(len(_MARK) if head.startswith(_MARK) else 0)
        if not len(self.starts):
            raise DataError(f"{path}: the file is empty; it must hold one JSON object per line")

    def line(self, row: int) -> int:
        """The line number of `row`, counted from 1, including blank lines."""
        return row + 1 + (int(np.searchsorted(self._blanks, row, side="right")) if len(self._blanks) else 0)

    def where(self, row: int) -> str:
        return f"{self.path}, line {self.line(row)}"

    def read(self, row: int) -> Row:
        """The object on the line of `row`. Blank lines after it are read too: JSON ignores them."""
        start = int(self.starts[row])
        end = int(self.starts[row + 1]) if row + 1 < len(self.starts) else self.size
        raw = os.pread(self._handle, end - start, start)
        if self._state() != self._stamp or len(raw) != end - start:
            raise DataError(f"{self.where(row)}: the file has changed since it was opened; start the run again")
        try:
            found = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            raise DataError(f"{self.where(row)}: not UTF-8 text ({error.reason})") from error
        except (ValueError, RecursionError) as error:  # ValueError alone: a number with thousands of digits
            reason = f"not JSON ({error}); each line must be one JSON object{_array_hint(raw)}"
            raise DataError(f"{self.where(row)}: {reason}") from error
        if not isinstance(found, dict):
            reason = f"must be a JSON object with named fields, not {type(found).__name__}{_array_hint(raw)}"
            raise DataError(f"{self.where(row)}: {reason}")
        return found

    def _state(self) -> tuple[int, int]:
        status = os.fstat(self._handle)
        return status.st_size, status.st_mtime_ns

    def _index(self, first: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The offsets of non-blank lines, and for each blank line the number of the row after it."""
        lines, first_bytes = self._lines(first)
        ends = np.append(lines[1:] - 1, self.size)
        blank = ends <= lines
        for number in np.flatnonzero(np.isin(first_bytes, np.frombuffer(_SPACE, np.uint8)) & ~blank):
            start, end = int(lines[number]), int(ends[number])
            blank[number] = not os.pread(self._handle, end - start, start).strip(_SPACE)
        return lines[~blank], np.cumsum(~blank, dtype=np.int64)[blank]

    def _lines(self, first: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """The offset and first byte of each line. Text after the last line end counts as a line.

        `first`: the offset of the first line, after a byte order mark.
        """
        starts, first_bytes, pending = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)], [first]
        for offset in range(0, self.size, _CHUNK):
            chunk = np.frombuffer(os.pread(self._handle, _CHUNK, offset), np.uint8)
            found = np.concatenate([pending, np.flatnonzero(chunk == ord("\n")) + (offset + 1)]).astype(np.int64)
            inside = found[found < offset + len(chunk)]
            pending = found[
                len(inside) :
            ].tolist()  # a line end is the last byte: the next line starts in the next chunk
            starts.append(inside)
            first_bytes.append(chunk[inside - offset])
        return np.concatenate(starts), np.concatenate(first_bytes)


def _array_hint(line: bytes) -> str:
    if not line.lstrip().startswith(b"["):
        return ""
    return ". Convert a file with one array by `jq -c '.[]' in.json > out.jsonl`"
