"""Write token data (see `reading`) as a stream, in memory that does not depend on the number of rows."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import numpy as np

from rlframework.datasets.tokens.reading import DTYPES, FORMAT, MASK, META, OFFSETS, TOKENS, VERSION, TokenData
from rlframework.errors import DataError
from rlframework.files import replacing_directory

if TYPE_CHECKING:
    from rlframework.datasets.rendering import Rendered

_BUFFERED = 1 << 18
"""Number of tokens to buffer before writing."""


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
    """Write `rows` (ids and mask each) to the folder `path` atomically, and open it.

    Recorded in `meta.json`: `tokenizer` (a fingerprint), `train_on` and `max_tokens` (how the rows were rendered), and
    `source` (JSON values). An existing `path` is replaced. Raises a `DataError` if there are no rows or nothing to
    train on, for an empty row, a mask of another length, and an id outside the vocabulary.
    """
    dtype = "uint16" if vocab_size <= 2**16 else "uint32"
    with replacing_directory(path) as folder:
        with (
            (folder / TOKENS).open("wb") as tokens,
            (folder / MASK).open("wb") as mask,
            (folder / OFFSETS).open("wb") as offsets,
        ):
            writer = _Writer(tokens, mask, offsets, DTYPES[dtype], vocab_size)
            for ids, trained in rows:
                writer.add(ids, trained)
            counts = writer.finish()
        meta = {
            "format": FORMAT,
            "version": VERSION,
            **counts,
            "vocab_size": vocab_size,
            "dtype": dtype,
            "tokenizer": tokenizer,
            "train_on": train_on,
            "max_tokens": max_tokens,
            "source": dict(source or {}),
        }
        (folder / META).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return TokenData(path)


class _Writer:
    """Buffers rows and appends them to the files."""

    def __init__(self, tokens: BinaryIO, mask: BinaryIO, offsets: BinaryIO, dtype: np.dtype[Any], vocab: int) -> None:
        self._files = {TOKENS: tokens, MASK: mask, OFFSETS: offsets}
        self._sums = dict.fromkeys(self._files, 0)
        self._dtype, self._vocab = dtype, vocab
        self._ids: list[int] = []
        self._trained: list[bool] = []
        self._ends: list[int] = [0]
        self._rows = self._tokens = self._trained_tokens = self._longest = 0

    def add(self, ids: list[int], trained: list[bool]) -> None:
        if not ids or len(ids) != len(trained):
            raise DataError(
                f"row {self._rows} has {len(ids)} tokens and a mask of {len(trained)}; both must be equal and above 0"
            )
        self._ids += ids
        self._trained += trained
        self._rows += 1
        self._tokens += len(ids)
        self._longest = max(self._longest, len(ids))
        self._ends.append(self._tokens)
        if len(self._ids) >= _BUFFERED:
            self._flush()

    def finish(self) -> dict[str, Any]:
        """Write the rest of the buffer; return counts and checksums."""
        if not self._rows:
            raise DataError("there are no rows to write")
        self._flush()
        if not self._trained_tokens:
            raise DataError("no token of any row is trained on; there is nothing to learn")
        return {
            "rows": self._rows,
            "tokens": self._tokens,
            "trained_tokens": self._trained_tokens,
            "longest": self._longest,
            "crc32": self._sums,
        }

    def _flush(self) -> None:
        ids = np.array(self._ids, np.int64)
        if len(ids) and (ids.min() < 0 or ids.max() >= self._vocab):
            raise DataError(
                f"token ids are from {ids.min()} to {ids.max()}, but the vocabulary has {self._vocab} tokens"
            )
        mask = np.array(self._trained, np.uint8)
        self._trained_tokens += int(mask.sum())
        self._write(TOKENS, ids.astype(self._dtype))
        self._write(MASK, mask)
        self._write(OFFSETS, np.array(self._ends, "<i8"))
        self._ids, self._trained, self._ends = [], [], []

    def _write(self, name: str, numbers: np.ndarray[Any, Any]) -> None:
        content = numbers.tobytes()
        self._files[name].write(content)
        self._sums[name] = zlib.crc32(content, self._sums[name])
