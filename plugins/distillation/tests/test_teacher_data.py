"""Rows with the log-probabilities of a teacher: what is written is read, and damage is reported."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from rlframework.base.errors import DataError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.datasets.tokens import write_token_data
from rlframework_distillation.teacher_data import TeacherData, write_teacher_data

ROWS = [([5, 6, 7], [False, True, True]), ([8], [True]), ([1, 2, 3, 4], [False, False, True, True])]


class Teacher:
    """The most likely tokens after token t are t and t + 1 (modulo 10), with 0.5 and 0.25."""

    def get_topk_logits(self, data, k, micro_batch_size=None, positions="all"):
        before = data["input_ids"].roll(1, 1)
        real = torch.arange(before.shape[1]) < data["input_lengths"][:, None]
        real[:, 0] = False
        logits = (torch.tensor([0.5, 0.25]).log() + 3.0).expand(*before.shape, 2)
        ids = torch.stack((before, (before + 1) % 10), -1)
        return BatchedDataDict(
            {
                "topk_logits": logits * real[..., None],
                "topk_indices": ids * real[..., None],
                "topk_normalizers": torch.full(before.shape, 3.0) * real,
            }
        )


@pytest.fixture
def stored(tmp_path: Path) -> TeacherData:
    tokens = write_token_data(tmp_path / "tokens", ROWS, vocab_size=10, tokenizer="t", train_on="last")
    return write_teacher_data(tmp_path / "stored", tokens, Teacher(), top_k=2, name="a teacher", batch_size=2)


def test_rows_come_back_with_the_teacher(stored: TeacherData) -> None:
    stored.verify()
    assert (len(stored), stored.meta.top_k, stored.meta.teacher, stored.meta.temperature) == (3, 2, "a teacher", 1.0)
    data = stored.batch([2, 0], pad_id=9)
    assert data["input_ids"].tolist() == [[1, 2, 3, 4], [5, 6, 7, 9]]
    assert data["token_sets"].tolist() == [
        [[0, 0], [1, 2], [2, 3], [3, 4]],
        [[0, 0], [5, 6], [6, 7], [0, 0]],
    ]
    expected = torch.tensor([0.5, 0.25]).log()
    torch.testing.assert_close(data["teacher_logprobs"][0, 1:], expected.expand(3, 2))
    assert not data["teacher_logprobs"][:, 0].any()
    assert not data["teacher_logprobs"][1, 3].any()


@pytest.mark.parametrize(
    ("file", "value", "message"),
    [
        ("topk_ids.bin", np.array([10], "<u4"), "outside the vocabulary"),
        ("topk_ids.bin", np.array([6], "<u4"), "twice among the most likely"),
        ("topk_logprobs.bin", np.array([0.0], "<f4"), "not finite or above 1"),
        ("topk_logprobs.bin", np.array([np.nan], "<f4"), "not finite or above 1"),
    ],
)
def test_values_that_cannot_be_are_damage(stored: TeacherData, file: str, value: np.ndarray, message: str) -> None:
    """Also where the checksum is that of the wrong values."""
    import zlib

    path, meta = stored.path / file, stored.path / "teacher.json"
    content = bytearray(path.read_bytes())
    content[8:12] = value.tobytes()  # the first of the two tokens at the second token of the first row
    path.write_bytes(content)
    with pytest.raises(DataError, match="checksum"):
        TeacherData(stored.path).verify()
    values = json.loads(meta.read_text())
    values["crc32"][file] = zlib.crc32(content)
    meta.write_text(json.dumps(values))
    with pytest.raises(DataError, match=message):
        TeacherData(stored.path).verify()


def test_incomplete_folders_are_rejected_when_they_are_opened(stored: TeacherData) -> None:
    path = stored.path / "topk_ids.bin"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match="bytes instead of"):
        TeacherData(stored.path)
    (stored.path / "teacher.json").write_text("{}")
    with pytest.raises(DataError, match=r"teacher\.json: is damaged"):
        TeacherData(stored.path)
    with pytest.raises(DataError, match="not teacher data"):
        TeacherData(stored.path / "rows")
