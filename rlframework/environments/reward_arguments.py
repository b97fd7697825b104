"""The arguments of a user's reward function, by its signature: of rlframework, TRL or verl (`Convention`).

`EmptyColumns` counts rows without a value in a column that the function asks for.
"""

from __future__ import annotations

import difflib
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlframework.datasets.nested_columns import VERL_COLUMN, is_column, value_of, verl_answer
from rlframework.datasets.sources.rows import Rows
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import text_of
from rlframework.plugins.user_defined import Convention, RewardForm

_TRL_TEXTS = {"prompt", "completion", "prompts", "completions"}
"""Columns that TRL does not pass on: they are, or would clash with, its two arguments."""

_ONLY_TRL = ("completion_ids", "prompt_ids", "trainer_state", "environments", "log_extra", "log_metric")
"""Arguments of TRL's reward functions that are not columns."""

_ABSENT = object()


@dataclass(frozen=True)
class TextColumns:
    """The names that the columns `prompt` and `answer` have in the data."""

    prompt: str = "prompt"
    answer: str = "answer"


class RewardArguments(ABC):
    """The arguments of a function with the signature `form`, on data with `columns`."""

    def __init__(self, form: RewardForm, columns: TextColumns) -> None:
        self._form, self._columns = form, columns

    def given(self, columns: Collection[str]) -> list[str]:
        """The names by which the function may ask for values of rows with `columns`."""
        return []

    @abstractmethod
    def asked_of(self, sample: Sample) -> dict[str, Any]:
        """The values in `sample` that the function asks for by name; None for one that it lacks."""

    @abstractmethod
    def of_call(self, samples: Sequence[Sample], completions: Sequence[str]) -> dict[str, Any]:
        """The arguments of one call: for all of the answers, or for the only one."""

    def hint(self, missing: Sequence[str]) -> str:
        """The end of an error: what to do if no row has the values `missing`; empty if there is nothing special."""
        return ""


def arguments_of(form: RewardForm, columns: TextColumns) -> RewardArguments:
    """Return the arguments of a function of `form`."""
    return _CONVENTIONS[form.convention](form, columns)


class _OwnArguments(RewardArguments):
    """Any of the names in `SINGULAR` or `PLURAL`."""

    def asked_of(self, sample: Sample) -> dict[str, Any]:
        return {"answer": sample.answer or None} if {"answer", "answers"} & {*self._form.names} else {}

    def of_call(self, samples: Sequence[Sample], completions: Sequence[str]) -> dict[str, Any]:
        given: dict[str, Sequence[Any]] = {
            "samples": samples,
            "completions": completions,
            "answers": [sample.answer for sample in samples],
            "prompts": [_prompt(sample) for sample in samples],
        }
        if self._form.batched:
            return {name: given[name] for name in self._form.names}
        return {name: given[f"{name}s"][0] for name in self._form.names}


class _TrlArguments(RewardArguments):
    """TRL's: `prompts`, `completions`, and every column of the rows.

    If the column of the prompt holds messages, prompts and completions are lists of messages. Columns that only other
    rows of the data have are lists of None if they are required.
    """

    def given(self, columns: Collection[str]) -> list[str]:
        return _without_texts([*columns, *(["answer"] if is_column(self._columns.answer, columns) else [])])

    def asked_of(self, sample: Sample) -> dict[str, Any]:
        row = self._row(sample)
        return {name: row.get(name) for name in _without_texts([*self._form.required, *self._form.optional])}

    def of_call(self, samples: Sequence[Sample], completions: Sequence[str]) -> dict[str, Any]:
        rows = [self._row(sample) for sample in samples]
        names = _without_texts([*(name for row in rows for name in row), *self._form.required])
        prompts, answers = [], []
        for row, sample, completion in zip(rows, samples, completions, strict=True):
            asked = value_of(row, self._columns.prompt)
            conversational = isinstance(asked, list)
            prompts.append(asked if conversational else _prompt(sample))
            answers.append([{"role": "assistant", "content": completion}] if conversational else completion)
        return {**{name: [row.get(name) for row in rows] for name in names}, "prompts": prompts, "completions": answers}

    def hint(self, missing: Sequence[str]) -> str:
        ours = [name for name in missing if name in _ONLY_TRL]
        if not ours:
            return ""
        return f"{', '.join(map(repr, ours))}: an argument of TRL that rlframework does not give; remove it"

    def _row(self, sample: Sample) -> Mapping[str, Any]:
        """The row, in which the answer is also under the name `answer` if its column has another one."""
        answer = value_of(sample.metadata, self._columns.answer, _ABSENT)
        return sample.metadata if answer is _ABSENT else {"answer": answer, **sample.metadata}


class _VerlArguments(RewardArguments):
    """verl's: `data_source` and `extra_info` of the row, `ground_truth` of its `reward_model`, and `solution_str`."""

    def given(self, columns: Collection[str]) -> list[str]:
        known = VERL_COLUMN in columns or is_column(self._columns.answer, columns)
        return [name for name in ("data_source", "extra_info") if name in columns] + ["ground_truth"] * known

    def asked_of(self, sample: Sample) -> dict[str, Any]:
        row = self._row(sample)
        return {name: row.get(name) for name in (*self._form.required, *self._form.optional)}

    def of_call(self, samples: Sequence[Sample], completions: Sequence[str]) -> dict[str, Any]:
        row, (completion,) = self._row(samples[0]), completions
        optional = {name: row[name] for name in self._form.optional if name in row}
        return {name: row.get(name) for name in self._form.required} | optional | {"solution_str": completion}

    def hint(self, missing: Sequence[str]) -> str:
        if "ground_truth" not in missing:
            return "Add the column to the data, or give the parameter a default"
        return (
            f"'ground_truth' is the key of that name in the column {VERL_COLUMN!r}, or else the answer: set "
            "environment.columns.answer to the name of its column"
        )

    @staticmethod
    def _row(sample: Sample) -> dict[str, Any]:
        answer = verl_answer(sample.metadata)
        return {**sample.metadata, "ground_truth": (sample.answer or None) if answer is None else answer}


_CONVENTIONS: Mapping[Convention, type[RewardArguments]] = {
    Convention.OWN: _OwnArguments,
    Convention.TRL: _TrlArguments,
    Convention.VERL: _VerlArguments,
}


def missing_columns(arguments: RewardArguments, missing: Sequence[str], given: Sequence[str], source: str) -> str:
    """The end of a message about a function that asks for the values `missing`, which no row of `source` has."""
    asked, there = ", ".join(map(repr, missing)), ", ".join(map(repr, given)) or "none"
    message = f"asks for {asked}, which no row of {source} has; the columns that it may ask for are {there}"
    if hint := arguments.hint(missing):
        return f"{message}. {hint}"
    near = [(name, match) for name in missing for match in difflib.get_close_matches(name, given, 1)]
    meant = "".join(f". Did you mean {match!r} for {name!r}?" for name, match in near)
    return f"{message}{meant or '. Rename the parameter, or give it a default'}"


def _without_texts(names: Iterable[str]) -> list[str]:
    """The columns among `names` that functions with TRL's signature receive, each once."""
    return [name for name in dict.fromkeys(names) if name not in _TRL_TEXTS]


def _prompt(sample: Sample) -> str:
    return text_of(sample.messages[-1]) if sample.messages else ""


class EmptyColumns:
    """Counts, by column, those of `rows` that have no value in it."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._found: dict[str, list[int]] = {}

    def add(self, number: int, values: Mapping[str, Any]) -> None:
        """Count the row `number`, which has `values` in the columns that are asked for."""
        for name, value in values.items():
            if self._rows.is_empty(number, value):
                self._found.setdefault(name, []).append(number)

    def warnings(self, columns: Collection[str], checked: int, source: str) -> Iterator[str]:
        """Yield a warning for each of `columns`, those of the data, that has no value in some of the `checked` rows."""
        for name in (name for name in self._found if name in columns):
            numbers = self._found[name]
            yield (
                f"{len(numbers)} of the {checked} rows that were read of {source} have no value in the column "
                f"{name!r}, which environment.reward asks for; the first is {self._rows.where(numbers[0])}. The "
                "function gets None for them, or an empty text: fill the column, or remove these rows, unless the "
                "function handles that"
            )
