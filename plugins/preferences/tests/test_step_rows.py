"""Answers with labelled steps: what is a step and a label, and errors that name the row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlframework.base.errors import DataError
from rlframework_preferences.config import PreferencesConfig
from rlframework_preferences.preference_rows import steps_of
from rlframework_preferences.preference_samples import PreferencesEnvironment

ROW: dict[str, Any] = {"prompt": "8 even?", "completions": ["8 = 2 * 4", "yes"], "labels": [True, 0.5]}


@pytest.mark.parametrize("kind", [list, tuple])
def test_steps_and_labels(kind: type) -> None:
    sample = steps_of(ROW | {name: kind(ROW[name]) for name in ("completions", "labels")}, "here", "a-1")
    assert sample.completion == "8 = 2 * 4\nyes"
    assert sample.metadata == {"steps": ("8 = 2 * 4", "yes"), "labels": (1.0, 0.5)}


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"completions": "ab"}, "column 'completions': must be a list of texts, one for each step, not str"),
        ({"completions": {"a": 1, "b": 2}}, "column 'completions': must be a list of texts, one for each step, not di"),
        ({"completions": 5}, "column 'completions': must be a list of texts, one for each step, not int"),
        ({"completions": ["a", ""]}, "column 'completions': step 2 is ''; each must be a text, and not empty"),
        ({"completions": ["a", 5]}, "column 'completions': step 2 is 5; each must be a text, and not empty"),
        ({"completions": []}, "column 'completions': must be a list of texts, one for each step, and is empty"),
        ({"labels": "10"}, "column 'labels': must have a label for each of the 2 steps"),
        ({"labels": {"0": 1, "1": 0}}, "column 'labels': must have a label for each of the 2 steps"),
        ({"labels": 1}, "column 'labels': must have a label for each of the 2 steps"),
        ({"labels": [1]}, "column 'labels': must have a label for each of the 2 steps"),
        ({"labels": [1, 1.5]}, "column 'labels': must have a label for each of the 2 steps"),
        ({"labels": [1, float("nan")]}, "column 'labels': must have a label for each of the 2 steps"),
        ({"labels": [1, "yes"]}, "column 'labels': must have a label for each of the 2 steps"),
        ({"labels": None}, "there is no 'labels'; labelled steps need the columns prompt, completions, labels"),
    ],
)
def test_a_row_without_labelled_steps_is_named(tmp_path: Path, changed: dict[str, Any], problem: str) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in (ROW, ROW | changed)), encoding="utf-8")
    with pytest.raises(DataError) as raised:
        PreferencesEnvironment(PreferencesConfig(path=str(path)), seed=0)
    assert f"steps.jsonl, line 2, {problem}" in str(raised.value).replace("line 2: ", "line 2, ")
