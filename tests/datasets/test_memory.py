"""Rows from Python: which containers they come in, how they are named in messages, and their digest."""

from __future__ import annotations

from datetime import date
from decimal import Decimal
from typing import Any

import datasets
import numpy as np
import pytest

from rlframework.base.errors import DataError
from rlframework.datasets.sources.memory import given_rows

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
