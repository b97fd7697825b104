"""Rows of token data with the log-probabilities of a teacher: its most likely tokens at each position.

A folder holds, little-endian and without headers:

    rows/                    the token data, see `tokens`
    topk_ids.bin             ids of the teacher's k most likely tokens at each token of all rows: uint32 [tokens, k]
    topk_logprobs.bin        their log-probabilities, largest first: float32 [tokens, k]
    teacher.json             k, the temperature, the teacher's name, and checksums

Entry i belongs to the distribution that token i was drawn from; entries of the first token of a row are 0.
"""

from __future__ import annotations

import json
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, PositiveFloat, PositiveInt, ValidationError

from rlframework.base.errors import DataError
from rlframework.base.files import replacing_directory
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.datasets.tokens import TokenData, damaged, mapped
from rlframework_distillation.teacher_targets import Scorer

_META, _ROWS = "teacher.json", "rows"
_IDS, _LOGPROBS = ("topk_ids.bin", np.dtype("<u4")), ("topk_logprobs.bin", np.dtype("<f4"))
_VERIFIED = 4096
"""Tokens that are verified at once."""


class TeacherMeta(BaseModel):
    """The content of `teacher.json`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal["rlframework teacher rows"] = "rlframework teacher rows"
    version: Literal[1] = 1
    top_k: PositiveInt
    temperature: PositiveFloat
    teacher: str
    crc32: dict[str, int]


class TeacherData:
    """The rows and log-probabilities in the folder `path`; opening reads no tokens. `DataError` if it is incomplete."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.meta = _read_meta(self.path / _META)
        self.tokens = TokenData(self.path / _ROWS)
        self._starts = np.concatenate(([0], np.cumsum(self.tokens.lengths)))
        count = int(self._starts[-1]) * self.meta.top_k
        self._ids, self._logprobs = (
            mapped(self.path / name, dtype, count).reshape(-1, self.meta.top_k) for name, dtype in (_IDS, _LOGPROBS)
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: Sequence[int], pad_id: int = 0) -> BatchedDataDict[Any]:
        """Return the rows `indices` as a batch, with `token_sets [B, S, k]` int32 and `teacher_logprobs [B, S, k]`."""
        rows = self.tokens.rows(indices, pad_id)
        shape = (*rows.input_ids.shape, self.meta.top_k)
        sets, logprobs = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        for row, number in enumerate(indices):
            start, end = self._starts[number], self._starts[number + 1]
            sets[row, : end - start], logprobs[row, : end - start] = self._ids[start:end], self._logprobs[start:end]
        columns = {"token_sets": torch.from_numpy(sets), "teacher_logprobs": torch.from_numpy(logprobs)}
        return BatchedDataDict({**rows._asdict(), "sample_mask": torch.ones(len(indices)), **columns})

    def verify(self) -> None:
        """Read everything: checksums, ids in the vocabulary and different from each other, and probabilities.

        Raises a `DataError` that names the file.
        """
        self.tokens.verify()
        for name, numbers in ((_IDS[0], self._ids), (_LOGPROBS[0], self._logprobs)):
            if zlib.crc32(numbers.reshape(-1).data) != self.meta.crc32.get(name):
                raise damaged(self.path / name, f"its checksum is not that in {_META}")
        first = np.zeros(len(self._ids), bool)
        first[self._starts[:-1]] = True  # nothing predicts them
        for start in range(0, len(first), _VERIFIED):
            part = slice(start, start + _VERIFIED)
            ids, logprobs = self._ids[part][~first[part]], self._logprobs[part][~first[part]]
            if len(ids) and int(ids.max()) >= self.tokens.meta["vocab_size"]:
                raise damaged(self.path / _IDS[0], "it has ids outside the vocabulary")
            if self.meta.top_k > 1 and bool((np.diff(np.sort(ids, 1), axis=1) == 0).any()):
                raise damaged(self.path / _IDS[0], "a token is twice among the most likely ones of a position")
            if not np.isfinite(logprobs).all() or bool((np.exp(logprobs.astype(np.float64)).sum(1) > 1.001).any()):
                raise damaged(self.path / _LOGPROBS[0], "probabilities of a position are not finite or above 1")


def write_teacher_data(
    path: str | Path,
    tokens: TokenData,
    teacher: Scorer,
    *,
    top_k: int,
    name: str,
    temperature: float = 1.0,
    batch_size: int = 64,
) -> TeacherData:
    """Score the rows of `tokens` by `teacher`, `batch_size` at a time, write them to the folder `path`, and open it.

    `name`: the teacher's, for the record. `temperature`: that of the teacher's policy, at which it scores, 1 unless its
    `generation.temperature` is another. An existing `path` is replaced.
    """
    with replacing_directory(path) as folder:
        shutil.copytree(tokens.path, folder / _ROWS)
        with (folder / _IDS[0]).open("wb") as ids_file, (folder / _LOGPROBS[0]).open("wb") as logprobs_file:
            for start in range(0, len(tokens), batch_size):
                rows = tokens.rows(range(start, min(start + batch_size, len(tokens))))
                found = teacher.get_topk_logits(BatchedDataDict(rows._asdict()), top_k)
                logprobs = found["topk_logits"] - found["topk_normalizers"][..., None]
                for row, length in enumerate(rows.input_lengths.tolist()):
                    ids_file.write(found["topk_indices"][row, :length].numpy().astype(_IDS[1]).tobytes())
                    logprobs_file.write(logprobs[row, :length].numpy().astype(_LOGPROBS[1]).tobytes())
        sums = {file: zlib.crc32(np.memmap(folder / file, mode="r").data) for file, _ in (_IDS, _LOGPROBS)}
        meta = TeacherMeta(top_k=top_k, temperature=temperature, teacher=name, crc32=sums)
        (folder / _META).write_text(json.dumps(meta.model_dump(), indent=2) + "\n", encoding="utf-8")
    return TeacherData(path)


def _read_meta(path: Path) -> TeacherMeta:
    try:
        return TeacherMeta.model_validate_json(path.read_bytes())
    except OSError as error:
        raise DataError(
            f"{path}: not teacher data ({error.strerror}); give a folder that `write_teacher_data` wrote"
        ) from error
    except ValidationError as error:
        raise damaged(path, f"{error.errors()[0]['loc']}: {error.errors()[0]['msg']}") from error
