"""Rows that Python code gives to a run: lists of mappings and `datasets.Dataset`, with a digest of their content.

The rows stay in this process and are not copied: a list is read in place, a `Dataset` from its Arrow table. A resumed
run must be given the same rows again, which the digest tells: it depends on the columns and values of every row and on
their order, not on the kind of container.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import date, time, timedelta
from decimal import Decimal
from typing import TYPE_CHECKING, Any, TypeAlias
from uuid import UUID

import numpy as np
import numpy.typing as npt

from rlframework.base.errors import DataError
from rlframework.datasets.sources.opening import dataset_rows
from rlframework.datasets.sources.rows import Row, Rows, counted_from_0
from rlframework.interfaces.messages import Picture

if TYPE_CHECKING:
    from datasets import Dataset

RowSequence: TypeAlias = "Sequence[Mapping[str, Any]] | Dataset"
Data: TypeAlias = "RowSequence | Mapping[str, RowSequence]"
"""Rows to train on, or `{"train": rows, "validation": rows}`."""

_ALLOWED = "give a list of dictionaries, a datasets.Dataset, or {'train': rows, 'validation': rows} of them"
_SPLITS = ("train", "validation")


class MemoryRows(Rows):
    """The mappings of a sequence, which must not change while they are in use. `split` names them in messages.

    NumPy arrays of objects, as pandas has for lists, are read as lists.
    """

    def __init__(self, rows: Sequence[Mapping[str, Any]], split: str) -> None:
        self._rows, self._split = rows, split

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Row:
        row = self._rows[index]
        if not isinstance(row, Mapping):
            raise DataError(f"{self.where(index)}: must be a dictionary of columns, not {type(row).__name__}")
        return {name: _with_lists(value) for name, value in row.items()}

    def where(self, index: int) -> str:
        """The split and the row, as Python counts them."""
        return f"{self._split} rows from Python, {counted_from_0(index)}"

    def label(self, index: int) -> str:
        """See `Rows.label`."""
        return f"{self._split}-{index}"

    def sizes(self) -> npt.NDArray[np.int64]:
        """See `Rows.sizes`: the characters of all texts in a row."""
        return np.fromiter((_characters(row) for row in self), np.int64, len(self))


@dataclass(frozen=True)
class GivenRows:
    """The rows that Python code gives to a run. `validation`: None to hold out part of `train`."""

    train: Rows
    validation: Rows | None = None

    def digest(self) -> str:
        """Return a digest of all rows in order. Raises a `DataError` for a value that has none, such as an object."""
        found = hashlib.blake2b(digest_size=16)
        for split, rows in (("train", self.train), ("validation", self.validation)):
            if rows is not None:
                found.update(f"{split} {len(rows)}\n".encode())
                for line in _lines(rows):
                    found.update(line)
        return f"blake2b:{found.hexdigest()}"


def given_rows(data: Data) -> GivenRows:
    """Return the rows of `data`: rows to train on, or `{"train": rows, "validation": rows}`.

    Rows are a list of dictionaries, or a `datasets.Dataset`. Raises a `DataError` for anything else, and for no rows.
    """
    if not isinstance(data, Mapping):
        return GivenRows(_rows(data, "train"))
    if "train" not in data or (unknown := sorted(map(str, data.keys() - {*_SPLITS}))):
        raise DataError(
            f"`data` has the splits {sorted(map(str, data))}; they must be 'train' and, optionally, 'validation'"
            + (f". Leave out {unknown}, or give one as 'validation'" if "train" in data else "")
        )
    validation = data.get("validation")
    return GivenRows(_rows(data["train"], "train"), None if validation is None else _rows(validation, "validation"))


def _rows(rows: Any, split: str) -> Rows:
    library = sys.modules.get("datasets")  # a caller with a Dataset has imported it
    if library is not None and isinstance(rows, library.Dataset):
        if rows.format["type"] == "custom":
            raise DataError(
                f"the {split} dataset has a transform, which is not applied when rows are read; apply it with map()"
            )
        return dataset_rows(rows, f"{split} dataset from Python", split)
    if not isinstance(rows, Sequence) or isinstance(rows, (str, bytes)):
        raise DataError(f"the {split} rows are {type(rows).__name__}; {_ALLOWED}")
    if not rows:
        raise DataError(f"the {split} rows are empty; give at least one")
    return MemoryRows(rows, split)


def _lines(rows: Rows) -> Iterator[bytes]:
    """Each row as canonical JSON."""
    encode = json.JSONEncoder(sort_keys=True, default=_plain).encode
    for number, row in enumerate(rows):
        try:
            yield encode(row).encode() + b"\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise DataError(
                f"{rows.where(number)}: has a value that cannot be compared when the run is resumed ({error}); give "
                "texts, numbers, lists and dictionaries, and remove other columns"
            ) from error


def _plain(value: Any) -> Any:
    """A JSON value for what tables hold besides texts and numbers."""
    if isinstance(value, (np.generic, np.ndarray)):
        return value.tolist()
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode()}
    if (library := sys.modules.get("PIL.Image")) is not None and isinstance(value, library.Image):
        return {"image": Picture(value, "").digest}
    if isinstance(value, (date, time, timedelta, Decimal, UUID)):
        return {type(value).__name__: str(value)}
    raise TypeError(f"it is {type(value).__name__}")


def _with_lists(value: Any) -> Any:
    """`value` with lists in place of arrays of objects, also in what it contains."""
    if isinstance(value, dict):
        return {key: _with_lists(entry) for key, entry in value.items()}
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.dtype == object):
        return [_with_lists(entry) for entry in value]
    return value


def _characters(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, (list, tuple)) else 0
