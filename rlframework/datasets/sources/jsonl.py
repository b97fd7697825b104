"""Reading JSON-lines files row by row, with errors that name the file and the line.

A file is gone through once for the places of its lines, in pieces, and stays open: a row is read when it is asked for.
Nothing but the places is kept in memory, 8 bytes a row.
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

_PIECE = 1 << 24
"""Bytes that are searched for line ends at a time."""

_SPACE = b" \t\r\n"
_MARK = b"\xef\xbb\xbf"
_PACKED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstandard", b"PK\x03\x04": "zip", b"BZh": "bzip2"}


def read_jsonl(path: Path, fields: Mapping[str, type]) -> list[tuple[int, dict[str, Any]]]:
    """All objects of the file with their line numbers, counted from 1; blank lines are left out.

    Each must be a JSON object with all `fields`, of the given types. Else, and for a file that is missing, not UTF-8
    or without any object: `DataError`.
    """
    rows = JsonlRows([path])
    return [(rows.line(index), check_fields(row, fields, rows.where(index))) for index, row in enumerate(rows)]


def check_fields(row: Row, fields: Mapping[str, type], where: str) -> Row:
    """`row`, which must have all `fields`, of the given types; else a `DataError` that begins with `where`."""
    for name, kind in fields.items():
        if name not in row:
            raise DataError(f"{where}: the field {name!r} is missing; there are {sorted(row)}")
        if not isinstance(row[name], kind):
            raise DataError(f"{where}: the field {name!r} must be {kind.__name__}, not {type(row[name]).__name__}")
    return row


class JsonlRows(Rows):
    """The objects of JSON-lines files, one after the other; blank lines are left out.

    A file that is missing, packed, or without any line is a `DataError` here; a line that is not UTF-8 or not a JSON
    object when it is read, and so is a file that has changed since it was opened.
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
        """The file, and the line in it, counted from 1."""
        file, row = self._find(index)
        return file.where(row)

    def label(self, index: int) -> str:
        """See `Rows.label`."""
        file, row = self._find(index)
        return f"{file.path.stem}-{file.line(row)}"

    def line(self, index: int) -> int:
        """The line of row `index` in its file, counted from 1."""
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
    """An open file and where its lines start: `starts [rows]` int64, blank lines left out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle = os.open(path, os.O_RDONLY)
            weakref.finalize(self, os.close, self._handle)
            head = os.pread(self._handle, 4, 0)
        except OSError as error:
            raise DataError(f"{path}: cannot be read ({error.strerror}); give the path of a JSONL file") from error
        for sign, name in _PACKED.items():
            if head.startswith(sign):
                raise DataError(f"{path}: is packed ({name}); unpack it, one JSON object a line in UTF-8")
        self._stamp = self._state()
        self.size = self._stamp[0]
        self.starts, self._blanks = self._index(len(_MARK) if head.startswith(_MARK) else 0)
        if not len(self.starts):
            raise DataError(f"{path}: the file is empty; it must hold one JSON object a line")

    def line(self, row: int) -> int:
        """Counted from 1: `row` and the blank lines before it."""
        return row + 1 + (int(np.searchsorted(self._blanks, row, side="right")) if len(self._blanks) else 0)

    def where(self, row: int) -> str:
        return f"{self.path}, line {self.line(row)}"

    def read(self, row: int) -> Row:
        """The object on the line of `row`. Blank lines that follow it are read with it: they are space to JSON."""
        start = int(self.starts[row])
        end = int(self.starts[row + 1]) if row + 1 < len(self.starts) else self.size
        raw = os.pread(self._handle, end - start, start)
        if self._state() != self._stamp or len(raw) != end - start:
            raise DataError(f"{self.where(row)}: the file has changed since it was opened; start again")
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
        """Starts of the lines that are not blank, and for each blank line the number of the row that follows it."""
        lines, letters = self._lines(first)
        ends = np.append(lines[1:] - 1, self.size)
        blank = ends <= lines
        for number in np.flatnonzero(np.isin(letters, np.frombuffer(_SPACE, np.uint8)) & ~blank):
            start, end = int(lines[number]), int(ends[number])
            blank[number] = not os.pread(self._handle, end - start, start).strip(_SPACE)
        return lines[~blank], np.cumsum(~blank, dtype=np.int64)[blank]

    def _lines(self, first: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]]:
        """Where each line starts, and its first byte. What follows the last line end is a line where it is not empty.

        `first`: where the first line starts, behind a byte order mark.
        """
        starts, letters, pending = [np.zeros(0, np.int64)], [np.zeros(0, np.uint8)], [first]
        for offset in range(0, self.size, _PIECE):
            piece = np.frombuffer(os.pread(self._handle, _PIECE, offset), np.uint8)
            here = np.concatenate([pending, np.flatnonzero(piece == ord("\n")) + (offset + 1)]).astype(np.int64)
            inside = here[here < offset + len(piece)]
            pending = here[len(inside) :].tolist()  # a line end is the last byte: the line starts in the next piece
            starts.append(inside)
            letters.append(piece[inside - offset])
        return np.concatenate(starts), np.concatenate(letters)


def _array_hint(line: bytes) -> str:
    if not line.lstrip().startswith(b"["):
        return ""
    return ". A file that is one array becomes lines with `jq -c '.[]' in.json > out.jsonl`"
