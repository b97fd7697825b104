"""Rows of token ids: padded batches, and data sets rendered once and memory-mapped, written as a stream.

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
from typing import Annotated, Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field, JsonValue, PositiveInt, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic requires it before Python 3.12

from rlframework.base.errors import DataError
from rlframework.base.files import replacing_directory
from rlframework.datasets.chat.rendering import Rendered

_FORMAT, _VERSION = "rlframework token rows", 1
_File = Literal["tokens.bin", "mask.bin", "offsets.bin"]
_FILES: tuple[_File, ...] = get_args(_File)
_META, (_TOKENS, _MASK, _OFFSETS) = "meta.json", _FILES
_DTYPES: Mapping[str, np.dtype[Any]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}


class TokenRows(NamedTuple):
    """A padded batch: `input_ids [B, S]` int64, `input_lengths [B]` int64, `token_mask [B, S]` fp32."""

    input_ids: torch.Tensor
    input_lengths: torch.Tensor
    token_mask: torch.Tensor


def pad_rows(rows: Sequence[Sequence[int]], pad_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Pad lists of token ids on the right to `[B, S]` int64; also return the lengths, `[B]` int64.

    Raises a `DataError` if there are no rows.
    """
    if not rows:
        raise DataError("cannot make a batch of no rows; give at least one")
    lengths = [len(row) for row in rows]
    padded = np.full((len(rows), max(lengths)), pad_id, np.int64)
    for number, row in enumerate(rows):
        padded[number, : lengths[number]] = row
    return torch.from_numpy(padded), torch.tensor(lengths)


def pad_rendered(rows: Sequence[Rendered], pad_id: int) -> TokenRows:
    """Batch the rows that `rendering.render_samples` returns; the mask is 1 on tokens that are trained on."""
    input_ids, lengths = pad_rows([ids for ids, _ in rows], pad_id)
    mask, _ = pad_rows([trained for _, trained in rows], 0)
    return TokenRows(input_ids, lengths, mask.float())


class TokenMeta(TypedDict):
    """The content of `meta.json`. `tokenizer` is a fingerprint, `source` describes the configuration of the rows."""

    format: str
    version: int
    rows: PositiveInt
    tokens: PositiveInt
    trained_tokens: PositiveInt
    longest: PositiveInt
    crc32: Annotated[dict[_File, int], Field(min_length=3)]
    vocab_size: PositiveInt
    dtype: Literal["uint16", "uint32"]
    tokenizer: str
    train_on: str
    max_tokens: PositiveInt | None
    source: dict[str, JsonValue]


class TokenData:
    """The token data in the folder `path`. `meta` is the content of its `meta.json`.

    Opening reads the offsets, 8 bytes per row, and no tokens. Raises a `DataError` if the folder is missing, damaged or
    incomplete. A changed number in tokens or mask is detected by `verify`.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.meta = _read_meta(self.path)
        rows, tokens = self.meta["rows"], self.meta["tokens"]
        self._offsets = mapped(self.path / _OFFSETS, np.dtype("<i8"), rows + 1)
        self._tokens = mapped(self.path / _TOKENS, _DTYPES[self.meta["dtype"]], tokens)
        self._mask = mapped(self.path / _MASK, np.dtype("u1"), tokens)
        steps = np.diff(self._offsets)
        ends = (self._offsets[0], self._offsets[-1])
        if ends != (0, tokens) or steps.min() <= 0 or steps.max() > self.meta["longest"]:
            raise damaged(self.path / _OFFSETS, "its offsets are inconsistent")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @property
    def lengths(self) -> npt.NDArray[np.int64]:
        """Number of tokens of each row, `[rows]` int64, without reading tokens."""
        return np.diff(self._offsets)

    def rows(self, indices: Sequence[int] | npt.NDArray[Any], pad_id: int = 0) -> TokenRows:
        """Return the rows `indices`, in this order, padded on the right with `pad_id` (mask 0).

        Copies block by block, which takes less than half the time of a gather by token. Raises a `DataError` for an id
        outside the vocabulary, and a mask other than 0 and 1.
        """
        numbers = np.asarray(indices, np.int64)
        starts, ends = self._offsets[numbers], self._offsets[numbers + 1]
        shape = (len(numbers), int((ends - starts).max()))
        ids, mask = np.full(shape, pad_id, np.int64), np.zeros(shape, np.float32)
        for row, (start, end) in enumerate(zip(starts.tolist(), ends.tolist(), strict=True)):
            ids[row, : end - start] = self._tokens[start:end]
            mask[row, : end - start] = self._mask[start:end]
        if int(ids.max()) >= max(self.meta["vocab_size"], pad_id + 1) or float(mask.max()) > 1.0:
            raise damaged(self.path, "it has ids outside the vocabulary or an invalid mask")
        return TokenRows(torch.from_numpy(ids), torch.from_numpy(ends - starts), torch.from_numpy(mask))

    def verify(self) -> None:
        """Read everything and compare the checksums. Raises a `DataError` if a file has changed."""
        for name, numbers in zip(_FILES, (self._tokens, self._mask, self._offsets), strict=True):
            if zlib.crc32(numbers.data) != self.meta["crc32"][name]:
                raise damaged(self.path / name, "its checksum is not that in meta.json")


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
    dtype: Literal["uint16", "uint32"] = "uint16" if vocab_size <= 2**16 else "uint32"
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
            "crc32": {name: zlib.crc32(np.memmap(folder / name, mode="r").data) for name in _FILES},
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
    remedy = "give a folder written by `rlframework tokenize`"
    try:
        meta = json.loads((path / _META).read_bytes())
    except OSError as error:
        raise DataError(f"{path}: not token data ({_META} cannot be read: {error.strerror}); {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise damaged(path / _META, str(error)) from error
    if not isinstance(meta, dict) or meta.get("format") != _FORMAT:
        raise DataError(f"{path}: {_META} does not describe token data; {remedy}")
    if meta.get("version") != _VERSION:
        raise DataError(
            f"{path}: has format version {meta.get('version')!r}, but only {_VERSION} is supported; render it again"
        )
    try:
        return TypeAdapter(TokenMeta).validate_python({"max_tokens": None, "source": {}, **meta}, strict=True)
    except ValidationError as error:
        raise damaged(path / _META, f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error


def mapped(path: Path, dtype: np.dtype[Any], count: int) -> npt.NDArray[Any]:
    """Map the numbers of a file. Its size is checked first: reading past the end would kill the process."""
    try:
        size = os.stat(path).st_size
        if size == count * dtype.itemsize:
            return np.asarray(np.memmap(path, dtype, "r", shape=(count,)))
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); render the data again") from error
    raise damaged(path, f"it has {size:,} bytes instead of {count * dtype.itemsize:,}")


def damaged(path: Path, why: str) -> DataError:
    """Return the error of a file that is not as it was written."""
    return DataError(f"{path}: is damaged: {why}; render it again")
