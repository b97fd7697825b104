"""GSM8K's judged solutions, as preference pairs: to each test question, four solutions marked right or wrong.

The file is `example_model_solutions.jsonl` of https://github.com/openai/grade-school-math (MIT licence). A line is one
question, its `ground_truth`, and under the name of each model `{"is_correct": true or false, "solution": text}`. Any
file of that form is read, with any names. The solutions are left as they are: with calculator annotations
(`<<16-7=9>>`) and `A: 18` at the end. The questions are those of the test data: do not report accuracy on
them after training on these pairs.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlframework.datasets.preferences import PreferenceRow
from rlframework.datasets.sources.jsonl import read_jsonl
from rlframework.errors import DataError
from rlframework.interfaces.environment import Message

_FIELDS = {"question": str, "ground_truth": str}
_MARKED = '{"is_correct": true or false, "solution": "..."}'


@dataclass(frozen=True)
class JudgedQuestion:
    """A question with its right and its wrong solutions, each once, in the order of the file."""

    id: str
    question: str
    right: tuple[str, ...]
    wrong: tuple[str, ...]


def read_judged_solutions(path: str | Path) -> list[JudgedQuestion]:
    """All questions of the file. A missing file or a line of another form is a `DataError` naming file and line."""
    path = Path(path)
    return [
        _question(row, f"{path}, line {number}", f"{path.stem}-{number}") for number, row in read_jsonl(path, _FIELDS)
    ]


def pair_solutions(
    questions: Sequence[JudgedQuestion], *, pairs: Literal["all", "one"] = "all", seed: int = 0
) -> list[PreferenceRow]:
    """A right solution as chosen with a wrong one as rejected, scores 1 and 0; questions without both give none.

    `"all"`: each right one with each wrong one, in order. `"one"`: one pair a question, drawn with `seed`, so that
    questions weigh alike. To hold some out for validation, divide the questions, not the pairs: pairs of one question
    have the prompt and often a solution in common.
    """
    if pairs not in ("all", "one"):
        raise DataError(f"pairs is {pairs!r}; take 'all' or 'one'")
    draw = random.Random(seed)
    rows = []
    for question in questions:
        both = [(right, wrong) for right in question.right for wrong in question.wrong]
        if pairs == "one" and both:
            both = [draw.choice(both)]
        rows += [_row(question, right, wrong) for right, wrong in both]
    return rows


def _row(question: JudgedQuestion, right: str, wrong: str) -> PreferenceRow:
    name = f"{question.id}:{question.right.index(right)}>{question.wrong.index(wrong)}"
    prompt: Message = {"role": "user", "content": question.question}
    return PreferenceRow((prompt,), right, wrong, name, scores=(1.0, 0.0))


def _question(row: dict[str, Any], where: str, name: str) -> JudgedQuestion:
    marked: dict[bool, list[str]] = {True: [], False: []}
    models = [model for model in row if model not in _FIELDS]
    for model in models:
        entry = row[model]
        solution, correct = (
            (entry.get("solution"), entry.get("is_correct")) if isinstance(entry, dict) else (None, None)
        )
        if not isinstance(solution, str) or not isinstance(correct, bool):
            raise DataError(f"{where}: the field {model!r} must be {_MARKED}")
        if solution in marked[not correct]:
            raise DataError(f"{where}: the solution of {model!r} is marked right and wrong; correct one mark")
        if solution not in marked[correct]:
            marked[correct].append(solution)
    if not models:
        raise DataError(f"{where}: there is no solution; each is a field {_MARKED} under the name of a model")
    return JudgedQuestion(name, row["question"], tuple(marked[True]), tuple(marked[False]))
