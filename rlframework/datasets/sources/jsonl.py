"""Read JSON-lines files row by row, with errors that name the file and the line.

A file is scanned once for the offsets of its lines, 8 bytes per row, and stays open; a row is read on access. The
readers of `datasets` and pyarrow convert a file to Arrow first: they know no line numbers, and reject rows of different
types.
"""

from __future__ import annotations

import json
import os
import weakref
from array import array
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rlframework.datasets.sources.rows import Row, Rows
from rlframework.errors import DataError

_SPACE = b" \t\r\n"
_MARK = b"\xef\xbb\xbf"
_COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstandard", b"PK\x03\x04": "zip", b"BZh": "bzip2"}


class JsonlRows(Rows):
    """The objects of JSON-lines files in order; blank lines are skipped.

    Raises a `DataError` on opening for a file that is missing, compressed or empty, and on reading for a line that is
    not UTF-8 or not a JSON object, or a file that has changed since it was opened.
    """

    def __init__(self, paths: Sequence[str | Path]) -> None:
        self._files = [_File(Path(path)) for path in paths]
        self._starts: list[int] = np.cumsum([0, *(len(file.starts) for file in self._files)]).tolist()

    def __len__(self) -> int:
        return self._starts[-1]

    def where(self, index: int) -> str:
        """The file and the line, counted from 1."""
        file, row = self._find(index)
        return file.where(row)

    def label(self, index: int) -> str:
        """See `Rows.label`."""
        file, row = self._find(index)
        return f"{file.path.stem}-{file.line(row)}"

    def sizes(self) -> npt.NDArray[np.int64]:
        """See `Rows.sizes`: the bytes of the lines."""
        return np.concatenate([np.diff(np.array(file.starts), append=file.size) for file in self._files])

    def read(self, index: int) -> Row:
        """See `Rows.read`."""
        file, row = self._find(index)
        return file.read(row)

    def _find(self, index: int) -> tuple[_File, int]:
        number = bisect_right(self._starts, index) - 1
        return self._files[number], index - self._starts[number]


class _File:
    """An open file and the offsets of its non-blank lines, `starts`."""

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
        if not self.starts:
            raise DataError(f"{path}: the file is empty; it must hold one JSON object per line")

    def line(self, row: int) -> int:
        """The line number of `row`, counted from 1, including blank lines."""
        return row + 1 + bisect_right(self._blanks, row)

    def where(self, row: int) -> str:
        return f"{self.path}, line {self.line(row)}"

    def read(self, row: int) -> Row:
        """The object on the line of `row`. Blank lines after it are read too: JSON ignores them."""
        start = self.starts[row]
        end = self.starts[row + 1] if row + 1 < len(self.starts) else self.size
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

    def _index(self, offset: int) -> tuple[array[int], array[int]]:
        """The offsets of non-blank lines from `offset` on, and for each blank line the number of the row after it."""
        starts, blanks = array("q"), array("q")
        with open(self._handle, "rb", closefd=False) as file:
            file.seek(offset)
            for line in file:
                if line.strip(_SPACE):
                    starts.append(offset)
                else:
                    blanks.append(len(starts))
                offset += len(line)
        return starts, blanks


def _array_hint(line: bytes) -> str:
    if not line.lstrip().startswith(b"["):
        return ""
    return ". Convert a file with one array by `jq -c '.[]' in.json > out.jsonl`"
