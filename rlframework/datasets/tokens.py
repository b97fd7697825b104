"""Rows of token ids, rendered once and memory-mapped: data sets larger than memory, written as a stream.

A folder holds, little-endian and without headers:

    meta.json     counts, dtype, tokenizer, source and rendering of the rows, and checksums
    tokens.bin    the concatenated ids of all rows: uint16, or uint32 for a vocabulary of more than 65,536
    mask.bin      1 for each token that is trained on, else 0: uint8
    offsets.bin   the start of each row and the end of the last one: int64, rows + 1

Arrow, which `datasets` maps in the same way, was considered: its record batches cost a search and an object per row,
and its format cannot reveal a damaged file.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt
import torch
from pydantic import JsonValue, PositiveInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from rlframework.datasets.collate import TokenRows
from rlframework.datasets.rendering import Rendered
from rlframework.errors import DataError
from rlframework.files import replacing_directory

Row = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]

_FORMAT, _VERSION = "rlframework token rows", 1
_META, _TOKENS, _MASK, _OFFSETS = "meta.json", "tokens.bin", "mask.bin", "offsets.bin"
_DTYPES: Mapping[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_CHUNK = 1 << 20


class TokenMeta(TypedDict):
    """The content of `meta.json`. `tokenizer` is a fingerprint, `source` describes the configuration of the rows."""

    format: str
    version: int
    rows: PositiveInt
    tokens: PositiveInt
    trained_tokens: PositiveInt
    longest: PositiveInt
    crc32: dict[str, int]
    vocab_size: PositiveInt
    dtype: str
    tokenizer: str
    train_on: str
    max_tokens: PositiveInt | None
    source: dict[str, JsonValue]


class TokenData(Sequence[Row]):
    """The token data in the folder `path`. `meta` is the content of its `meta.json`.

    Opening reads the offsets, 8 bytes per row, and no tokens. Raises a `DataError` if the folder is missing, damaged or
    incomplete. A changed number in tokens or mask is detected by `verify`, and by `rows` if it is out of range.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.meta = _read_meta(self.path)
        rows, tokens = self.meta["rows"], self.meta["tokens"]
        self._offsets = _mapped(self.path / _OFFSETS, np.dtype("<i8"), rows + 1)
        self._tokens = _mapped(self.path / _TOKENS, _DTYPES[self.meta["dtype"]], tokens)
        self._mask = _mapped(self.path / _MASK, np.dtype("u1"), tokens)
        self._check_offsets()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        chosen = range(len(self))[index]
        return self.row(chosen) if isinstance(chosen, int) else [self.row(number) for number in chosen]

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each row, `[rows]` int64, without reading tokens."""
        return np.diff(self._offsets)

    def row(self, index: int) -> Row:
        """The ids of row `index`, `[tokens]` int64, and their mask, `[tokens]` bool, true where trained on."""
        start, end = self._offsets[index], self._offsets[index + 1]
        return self._tokens[start:end].astype(np.int64), self._mask[start:end].astype(np.bool_)

    def rows(self, indices: Sequence[int] | npt.NDArray[Any], pad_id: int = 0) -> TokenRows:
        """Return the rows `indices`, in this order, padded on the right with `pad_id` (mask 0).

        Copies block by block, which takes less than half the time of a gather by token. Raises a `DataError` for an
        index out of range, an id outside the vocabulary, and a mask other than 0 and 1.
        """
        numbers = np.asarray(indices, np.int64)
        if numbers.ndim != 1 or not len(numbers) or numbers.min() < 0 or numbers.max() >= len(self):
            given = f"{numbers.min()} to {numbers.max()}" if numbers.size else "none"
            raise DataError(f"{self.path}: rows are numbered 0 to {len(self) - 1}; requested {given}")
        starts, ends = self._offsets[numbers], self._offsets[numbers + 1]
        shape = (len(numbers), int((ends - starts).max()))
        ids, mask = np.full(shape, pad_id, np.int64), np.zeros(shape, np.float32)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            ids[row, : end - start] = self._tokens[start:end]
            mask[row, : end - start] = self._mask[start:end]
        if int(ids.max()) >= max(self.meta["vocab_size"], pad_id + 1) or float(mask.max()) > 1.0:
            raise _damaged(self.path, "it has ids outside the vocabulary or an invalid mask")
        return TokenRows(torch.from_numpy(ids), torch.from_numpy(ends - starts), torch.from_numpy(mask))

    def verify(self) -> None:
        """Read everything and compare the checksums. Raises a `DataError` if a file has changed."""
        for name, numbers in {_TOKENS: self._tokens, _MASK: self._mask, _OFFSETS: self._offsets}.items():
            if zlib.crc32(numbers.data) != self.meta["crc32"][name]:
                raise _damaged(self.path / name, "its checksum is not that in meta.json")

    def _check_offsets(self) -> None:
        """Check that offsets increase from 0 to the number of tokens, in steps of at most the longest row."""
        offsets, longest = self._offsets, self.meta["longest"]
        fine = offsets[0] == 0 and offsets[-1] == self.meta["tokens"]
        for start in range(0, len(self), _CHUNK):
            steps = np.diff(offsets[start : start + _CHUNK + 1])
            fine = fine and steps.min() > 0 and steps.max() <= longest
        if not fine:
            raise _damaged(self.path / _OFFSETS, "its offsets are inconsistent")


def write_token_data(
    path: str | Path,
    rows: Iterable[Rendered],
    *,
    vocab_size: int,
    tokenizer: str,
    train_on: str,
    max_tokens: int | None = None,
    source: Mapping[str, Any] | None = None,
) -> TokenData:
    """Write `rows` (ids and mask each) to the folder `path` atomically, and open it. Takes memory for one row only.

    Recorded in `meta.json`: `tokenizer` (a fingerprint), `train_on` and `max_tokens` (how the rows were rendered), and
    `source` (JSON values). An existing `path` is replaced. Raises a `DataError` if there are no rows or nothing to
    train on, for an empty row, a mask of another length, and an id outside the vocabulary.
    """
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    count = total = trained_tokens = longest = 0
    with replacing_directory(path) as folder:
        with (
            (folder / _TOKENS).open("wb") as tokens_file,
            (folder / _MASK).open("wb") as mask_file,
            (folder / _OFFSETS).open("wb") as offsets_file,
        ):
            offsets_file.write(np.int64(0).astype("<i8").tobytes())
            for count, (ids, mask) in enumerate(rows, 1):
                _check_row(count - 1, ids, mask, vocab_size)
                total += len(ids)
                trained_tokens += sum(mask)
                longest = max(longest, len(ids))
                tokens_file.write(np.array(ids, _DTYPES[dtype]).tobytes())
                mask_file.write(np.array(mask, np.uint8).tobytes())
                offsets_file.write(np.int64(total).astype("<i8").tobytes())
        if not count:
            raise DataError("there are no rows to write")
        if not trained_tokens:
            raise DataError("no token of any row is trained on; there is nothing to learn")
        meta: TokenMeta = {
            "format": _FORMAT,
            "version": _VERSION,
            "rows": count,
            "tokens": total,
            "trained_tokens": trained_tokens,
            "longest": longest,
            "crc32": {name: zlib.crc32(np.memmap(folder / name, mode="r").data) for name in (_TOKENS, _MASK, _OFFSETS)},
            "vocab_size": vocab_size,
            "dtype": dtype,
            "tokenizer": tokenizer,
            "train_on": train_on,
            "max_tokens": max_tokens,
            "source": dict(source or {}),
        }
        (folder / _META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return TokenData(path)


def _check_row(number: int, ids: list[int], mask: list[bool], vocab_size: int) -> None:
    if not ids or len(ids) != len(mask):
        raise DataError(f"row {number} has {len(ids)} tokens and a mask of {len(mask)}; both must be equal and above 0")
    if min(ids) < 0 or max(ids) >= vocab_size:
        raise DataError(f"token ids are from {min(ids)} to {max(ids)}, but the vocabulary has {vocab_size} tokens")


def _read_meta(path: Path) -> TokenMeta:
    try:
        meta = json.loads((path / _META).read_bytes())
    except OSError as error:
        raise DataError(
            f"{path}: not token data ({_META} cannot be read: {error.strerror}); give a folder written by `rlframework "
            "tokenize`"
        ) from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path / _META, str(error)) from error
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise DataError(
            f"{path}: {_META} does not describe token data; give a folder written by `rlframework tokenize`"
        )
    if meta.get("version") != _VERSION:
        raise DataError(
            f"{path}: has format version {meta.get('version')!r}, but only {_VERSION} is supported; render it again"
        )
    try:
        checked = TypeAdapter(TokenMeta).validate_python({"max_tokens": None, "source": {}, **meta}, strict=True)
    except ValidationError as error:
        raise _damaged(path / _META, f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
    if checked["dtype"] not in _DTYPES or checked["crc32"].keys() != {_TOKENS, _MASK, _OFFSETS}:
        raise _damaged(path / _META, f"the dtype is {checked['dtype']!r}, the checksums are {checked['crc32']}")
    return checked


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """Map the numbers of a file. Its size is checked first: reading past the end would kill the process."""
    try:
        size = os.stat(path).st_size
        if size == count * dtype.itemsize:
            return np.asarray(np.memmap(path, dtype, "r", shape=(count,)))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); render the data again") from error
    raise _damaged(path, f"it has {size:,} bytes instead of {count * dtype.itemsize:,}")


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"{path}: is damaged: {why}; render it again")
