"""Memory-mapped rows of token ids: data sets larger than memory that `writing` rendered once.

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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import torch

from rlframework.datasets.collate import TokenRows
from rlframework.errors import DataError

if TYPE_CHECKING:
    import numpy.typing as npt

    Row = tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]

FORMAT, VERSION = "rlframework token rows", 1
META, TOKENS, MASK, OFFSETS = "meta.json", "tokens.bin", "mask.bin", "offsets.bin"
DTYPES: Mapping[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_COUNTS = ("rows", "tokens", "trained_tokens", "longest", "vocab_size")
_TEXTS = ("dtype", "tokenizer", "train_on")
_CHUNK = 1 << 20


class TokenData(Sequence["Row"]):
    """The token data in the folder `path`. `meta` is the content of its `meta.json`.

    Opening reads the offsets, 8 bytes per row, and no tokens. Raises a `DataError` if the folder is missing, damaged or
    incomplete. A changed number in tokens or mask is detected by `verify`, and by `rows` if it is out of range.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.meta: Mapping[str, Any] = _read_meta(self.path)
        rows, tokens = self.meta["rows"], self.meta["tokens"]
        self._offsets = _mapped(self.path / OFFSETS, np.dtype("<i8"), rows + 1)
        self._tokens = _mapped(self.path / TOKENS, DTYPES[self.meta["dtype"]], tokens)
        self._mask = _mapped(self.path / MASK, np.dtype("u1"), tokens)
        self._check_offsets()

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | list[Row]:
        if isinstance(index, slice):
            return [self.row(number) for number in range(*index.indices(len(self)))]
        return self.row(range(len(self))[index])

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
            raise DataError(f"{self.path}: rows are numbered 0 to {len(self) - 1}; requested {_shown(numbers)}")
        starts, ends = self._offsets[numbers], self._offsets[numbers + 1]
        shape = (len(numbers), int((ends - starts).max()))
        ids, mask = np.full(shape, pad_id, np.int64), np.zeros(shape, np.float32)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            ids[row, : end - start] = self._tokens[start:end]
            mask[row, : end - start] = self._mask[start:end]
        if int(ids.max()) >= max(self.meta["vocab_size"], pad_id + 1) or float(mask.max()) > 1.0:
            raise DataError(
                f"{self.path}: is damaged: it has ids outside the vocabulary or an invalid mask; render it again"
            )
        return TokenRows(torch.from_numpy(ids), torch.from_numpy(ends - starts), torch.from_numpy(mask))

    def verify(self) -> None:
        """Read everything and compare the checksums. Raises a `DataError` if a file has changed."""
        for name, expected in self.meta["crc32"].items():
            if checksum(self.path / name) != expected:
                raise DataError(
                    f"{self.path / name}: is damaged: its checksum is not that in meta.json; render it again"
                )

    def _check_offsets(self) -> None:
        """Check that offsets increase from 0 to the number of tokens, in steps of at most the longest row."""
        offsets, longest = self._offsets, self.meta["longest"]
        fine = offsets[0] == 0 and offsets[-1] == self.meta["tokens"]
        for start in range(0, len(self), _CHUNK):
            steps = np.diff(offsets[start : start + _CHUNK + 1])
            fine = fine and steps.min() > 0 and steps.max() <= longest
        if not fine:
            raise DataError(f"{self.path / OFFSETS}: is damaged: its offsets are inconsistent; render it again")


def checksum(path: Path) -> int:
    """CRC-32 of a file, read in chunks. Raises a `DataError` if the file cannot be read."""
    value = 0
    try:
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                value = zlib.crc32(chunk, value)
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); render the data again") from error
    return value


def _read_meta(path: Path) -> Mapping[str, Any]:
    try:
        meta = json.loads((path / META).read_bytes())
    except OSError as error:
        raise DataError(
            f"{path}: not token data ({META} cannot be read: {error.strerror}); give a folder written by `rlframework "
            "tokenize`"
        ) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path / META}: is damaged ({error}); render the data again") from error
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise DataError(f"{path}: {META} does not describe token data; give a folder written by `rlframework tokenize`")
    if meta.get("version") != VERSION:
        raise DataError(
            f"{path}: has format version {meta.get('version')!r}, but only {VERSION} is supported; render it again"
        )
    wrong = [name for name in _COUNTS if type(meta.get(name)) is not int or meta[name] < 1]
    wrong += [name for name in _TEXTS if not isinstance(meta.get(name), str)]
    limit = meta.get("max_tokens")
    wrong += [] if limit is None or (type(limit) is int and limit > 0) else ["max_tokens"]
    sums = meta.get("crc32")
    if not isinstance(sums, dict) or sums.keys() != {TOKENS, MASK, OFFSETS}:
        wrong.append("crc32")
    if wrong or meta["dtype"] not in DTYPES:
        raise DataError(f"{path / META}: is damaged: invalid {wrong or ['dtype']}; render it again")
    return meta


def _mapped(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """Map the numbers of a file. Its size is checked first: reading past the end would kill the process."""
    try:
        size = os.stat(path).st_size
        if size == count * dtype.itemsize:
            return np.asarray(np.memmap(path, dtype, "r", shape=(count,)))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); render the data again") from error
    raise DataError(f"{path}: is damaged: it has {size:,} bytes instead of {count * dtype.itemsize:,}; render it again")


def _shown(numbers: npt.NDArray[np.int64]) -> str:
    return f"{numbers.min()} to {numbers.max()}" if numbers.size else "none"
