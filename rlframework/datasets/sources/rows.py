"""`Rows`, the interface of every source of data: rows that are read on access, each with its place for messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from rlframework.errors import DataError

Row = dict[str, Any]
"""One row: plain Python values by column."""

_REASON = 300
"""Characters of another library's message to include in an error."""


class Rows(Sequence[Row], ABC):
    """A sequence of rows that are read on access. Reading a damaged row raises a `DataError` that names it."""

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
        chosen = range(len(self))[index]
        return self.read(chosen) if isinstance(chosen, int) else [self.read(number) for number in chosen]


def check_fields(row: Row, fields: Mapping[str, type], where: str) -> Row:
    """Return `row` if it has all `fields` of the given types; else raise a `DataError` that begins with `where`."""
    for name, kind in fields.items():
        if name not in row:
            raise DataError(f"{where}: the field {name!r} is missing; the fields are {sorted(row)}")
        if not isinstance(row[name], kind):
            raise DataError(f"{where}: the field {name!r} must be {kind.__name__}, not {type(row[name]).__name__}")
    return row


def unreadable(what: str, error: Exception, remedy: str = "") -> DataError:
    """The error for data that another library cannot read: `what`, the library's reason, and what to do."""
    reason = " ".join(str(error.__cause__ or error).split()).rstrip(".") or type(error).__name__
    return DataError(f"{what} ({reason[:_REASON]}). {remedy}".rstrip(". "))


@contextmanager
def reading(what: str, remedy: str = "") -> Iterator[None]:
    """Raise `unreadable` for whatever another library raises: it may be anything if a file is damaged."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        raise unreadable(what, error, remedy) from error
