"""Preference pairs from GSM8K's graded solutions: four solutions per test question, each marked right or wrong.

The file is `example_model_solutions.jsonl` of https://github.com/openai/grade-school-math (MIT licence). A line holds a
question, its `ground_truth`, and under each model's name `{"is_correct": true or false, "solution": text}`. Any file of
this form can be read, with any model names. Solutions are unchanged, with calculator annotations (`<<16-7=9>>`) and `A:
18` at the end. The questions are those of the test split: do not report accuracy on that split after training on these
pairs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from rlframework.base.errors import DataError
from rlframework.datasets.sources.rows import JsonlRows, Row, check_fields
from rlframework.interfaces.messages import Message
from rlframework_preferences.pairs import PreferenceRow

_FIELDS = {"question": str, "ground_truth": str}
_MARKED = '{"is_correct": true or false, "solution": "..."}'


@dataclass(frozen=True)
class GradedQuestion:
    """A question with its distinct right and wrong solutions, in the order of the file."""

    id: str
    question: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]


def read_graded_solutions(path: str | Path) -> list[GradedQuestion]:
    """Read all questions of the file. Raises a `DataError` that names file and line if one is missing or malformed."""
    rows = JsonlRows([path])
    return [graded_question(row, rows.where(index), rows.label(index)) for index, row in enumerate(rows)]


def pair_solutions(
    questions: Sequence[GradedQuestion], *, pairs: Literal["all", "one"] = "all", seed: int = 0
) -> list[PreferenceRow]:
    """Pair right solutions (chosen, score 1) with wrong ones (rejected, score 0); skip questions without both.

    `"all"`: each right with each wrong solution, in order. `"one"`: one pair per question, drawn with `seed`, so that
    questions have equal weight. To hold out validation data, split the questions, not the pairs: pairs of a question
    share the prompt and often a solution.
    """
    if pairs not in ("all", "one"):
        raise DataError(f"pairs is {pairs!r}; it must be 'all' or 'one'")
    draw = random.Random(seed)
    rows = []
    for question in questions:
        prompt: Message = {"role": "user", "content": question.question}
        found = [
            PreferenceRow((prompt,), right, wrong, f"{question.id}:{first}>{second}", scores=(1.0, 0.0))
            for first, right in enumerate(question.right)
            for second, wrong in enumerate(question.wrong)
        ]
        rows += [draw.choice(found)] if pairs == "one" and found else found
    return rows


def is_graded(row: Row) -> bool:
    """Whether `row` has the form of this file."""
    return row.keys() >= _FIELDS.keys()


def graded_question(row: Row, where: str, name: str) -> GradedQuestion:
    """Return the question `name` in `row`. Raises a `DataError` that begins with `where` if it is malformed."""
    check_fields(row, _FIELDS, where)
    marked: dict[bool, list[str]] = {True: [], False: []}
    models = [model for model in row if model not in _FIELDS]
    for model in models:
        entry = row[model] if isinstance(row[model], dict) else {}
        solution, correct = entry.get("solution"), entry.get("is_correct")
        if not isinstance(solution, str) or not isinstance(correct, bool):
            raise DataError(f"{where}: the field {model!r} must be {_MARKED}")
        if solution in marked[not correct]:
            raise DataError(f"{where}: the solution of {model!r} is marked both right and wrong; correct one mark")
        if solution not in marked[correct]:
            marked[correct].append(solution)
    if not models:
        raise DataError(f"{where}: no solution found; each is a field {_MARKED} under the name of a model")
    return GradedQuestion(name, row["question"], tuple(marked[True]), tuple(marked[False]))
