"""JSON lines: line numbers, encodings, and rows read in place."""

from __future__ import annotations

import gzip
import json
import os
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from rlframework.base.errors import DataError
from rlframework.datasets.sources.memory import given_rows
from rlframework.datasets.sources.rows import JsonlRows


def test_numbers_count_blank_lines_and_odd_line_ends(tmp_path: Path) -> None:
    """A byte order mark, Windows line ends, no last newline, and a separator that str.splitlines would break at."""
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"a": "x"}\r\n\r\n{"a": "y\xe2\x80\xa8z"}')
    rows = JsonlRows([path])
    assert list(rows) == [{"a": "x"}, {"a": "y\u2028z"}]
    assert [rows.label(index) for index in range(2)] == ["a-1", "a-3"]


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_several_files_are_one_sequence(tmp_path: Path) -> None:
    paths = [write(tmp_path / "a.jsonl", {"a": 1}, {"a": 2}), write(tmp_path / "b.jsonl", {"a": 3, "b": "x" * 50})]
    rows = JsonlRows(paths)
    assert [row["a"] for row in rows] == [1, 2, 3]
    assert [rows.label(number) for number in range(3)] == ["a-1", "a-2", "b-1"]
    assert rows.where(2) == f"{paths[1]}, line 1"
    assert rows.sizes().tolist() == [9, 9, len(json.dumps({"a": 3, "b": "x" * 50})) + 1]


def test_only_the_row_that_is_asked_for_is_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"a": 1}\n{]\n{"a": 3}\n', encoding="utf-8")
    rows = JsonlRows([path])
    assert rows[2] == {"a": 3}
    with pytest.raises(DataError, match=r"a\.jsonl, line 2: not JSON"):
        rows[1]


@pytest.mark.parametrize("change", ['{"a": 9}\n', '{"a": 1}\n{"a": 2}\n{"a": 3}\n', ""])
def test_a_file_that_changes_gives_no_stale_rows(tmp_path: Path, change: str) -> None:
    path = write(tmp_path / "a.jsonl", {"a": 1}, {"a": 2})
    rows = JsonlRows([path])
    path.write_text(change, encoding="utf-8")
    with pytest.raises(DataError, match="the file has changed since it was opened"):
        rows[1]
    if change:
        assert JsonlRows([path])[0] == json.loads(change.splitlines()[0])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'[{"a": 1}, {"a": 2}]', r"line 1: must be a JSON object with named fields, not list.*jq -c '\.\[\]'"),
        (b'{"a": 1}\n{"a": ' + b"1" * 5000 + b"}\n", r"line 2: not JSON \(Exceeds the limit"),
        (b'[\n  {"a": 1}\n]\n', r"line 1: not JSON.*jq -c"),
        (b'{"a": "x"}\n{"a": "\xff"}\n', "line 2: not UTF-8"),
        (b"[" * 200_000, "line 1: not JSON"),
        (b"3\n", "line 1: must be a JSON object with named fields, not int$"),
        (gzip.compress(b'{"a": 1}\n', mtime=0), r"line 1: not UTF-8 text .* is it compressed\?"),
        (b"", "the file is empty"),
        (b"\xef\xbb\xbf\n \n", "the file is empty"),
        (b'\xff\xfe{\x00"\x00a\x00', "line 1: not UTF-8"),
    ],
)
def test_what_is_no_json_lines(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=rf"a\.jsonl.*{message}"):
        list(JsonlRows([path]))


def test_a_pipe_and_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    """Opening a pipe would wait for somebody who writes to it."""
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read \(it is not a file\)"):
        JsonlRows([tmp_path / "a.jsonl"])
    with pytest.raises(DataError, match=r"cannot be read \(embedded null byte\)"):
        JsonlRows(["a\0.jsonl"])


ROWS = [{"question": f"{number}+1?", "answer": str(number + 1), "tags": ["sum", None]} for number in range(5)]


def digest(data: Any) -> str:
    return given_rows(data).digest()


@pytest.mark.parametrize("kind", [list, tuple, datasets.Dataset.from_list])
def test_the_same_rows_have_the_same_digest_in_any_container(kind: Any) -> None:
    rows = given_rows(kind(ROWS))
    assert [rows.train[number] for number in range(5)] == ROWS
    assert rows.validation is None
    assert rows.train.label(3) == "train-3"
    assert rows.digest() == digest([dict(reversed(row.items())) for row in ROWS])


def test_a_selection_and_a_dictionary_of_splits() -> None:
    dataset = datasets.Dataset.from_list(ROWS)
    splits = {"train": dataset.select([3, 1]), "validation": dataset.select([0])}
    rows = given_rows(datasets.DatasetDict(splits))
    assert rows.validation is not None
    assert [row["answer"] for row in rows.train] == ["4", "2"]
    assert [row["answer"] for row in rows.validation] == ["1"]
    assert digest(splits) == digest({"train": [ROWS[3], ROWS[1]], "validation": [ROWS[0]]})


@pytest.mark.parametrize(
    "other",
    [
        ROWS[::-1],
        ROWS[:-1],
        [*ROWS[:-1], ROWS[-1] | {"answer": 5}],
        [*ROWS[:-1], ROWS[-1] | {"more": None}],
        {"train": ROWS[:-1], "validation": ROWS[-1:]},
    ],
)
def test_other_rows_have_another_digest(other: Any) -> None:
    assert digest(other) != digest(ROWS)


def test_arrays_of_objects_are_lists() -> None:
    """As in `pandas.read_parquet(path).to_dict("records")`, whose nested lists are arrays too; numbers stay arrays."""
    turns = np.array([{"role": "user", "content": np.array([{"type": "text", "text": "hi"}], dtype=object)}])
    ids = np.arange(3)
    [row] = given_rows([{"prompt": turns, "reward_model": {"target": np.array(["a", None])}, "ids": ids}]).train
    assert row["prompt"] == [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    assert row["reward_model"] == {"target": ["a", None]}
    assert row["ids"] is ids


def test_values_of_tables() -> None:
    row = {"day": date(2026, 1, 2), "cost": Decimal("1.50"), "image": b"\x00\xff", "gap": float("nan")}
    assert digest([row]) == digest([dict(row)]) != digest([row | {"image": b"\x00"}])
    assert digest([{"ids": np.array([1, 2]), "n": np.int64(3)}]) == digest([{"ids": [1, 2], "n": 3}])


def test_the_size_of_a_row_counts_its_texts() -> None:
    rows = given_rows([{"a": "abc", "b": [{"c": "de"}, 7]}, {"a": None}]).train
    assert rows.sizes().tolist() == [5, 0]


def _doubled(batch: dict[str, list[str]]) -> dict[str, list[str]]:
    return {name: texts * 2 for name, texts in batch.items()}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "the train rows are empty; give at least one"),
        ("rows.jsonl", "the train rows are str; give a list of dictionaries, a datasets.Dataset, or"),
        (iter(ROWS), "the train rows are list_iterator; give a list"),
        ({"validation": ROWS}, r"has the splits \['validation'\]; they must be 'train' and, optionally, 'validation'"),
        ({"train": ROWS, "test": ROWS}, r"Leave out \['test'\], or give one as 'validation'"),
        ({"train": ROWS, "validation": []}, "the validation rows are empty"),
        (
            [ROWS[0], "text"],
            r"train rows from Python, row 1 \(counted from 0\): must be a dictionary of columns, not str",
        ),
        (
            [{"a": 1}, {"a": object()}],
            r"row 1 \(counted from 0\): has a value that cannot be compared .*\(it is object\)",
        ),
        (datasets.Dataset.from_list(ROWS).with_transform(_doubled), "has a transform, which is not applied"),
    ],
)
def test_what_cannot_be_rows(data: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        digest(data)
