"""Read preference pairs, and answers whose steps are labelled, from rows in the common published layouts.

| layout | columns |
| --- | --- |
| prompt and answers | `prompt`, `chosen`, `rejected`: texts, or lists of messages |
| conversations | `chosen`, `rejected`: lists of messages that differ in the last turn, with or without `prompt` |
| ShareGPT | `conversations`: a list of `{from, value}`; `chosen`, `rejected`: one such turn each |
| OpenAI | `input`: `{messages, tools}`; `preferred_output`, `non_preferred_output`: a list with one message each |

A column `tools` has the tools that the conversation has, `score_chosen` and `score_rejected` the scores of the answers,
or `margin` their difference. The answers of a pair differ, and the chosen one has the higher score (`check_pairs`).
Both answers are plain text, in one turn of the assistant. Two texts without a prompt are rejected: where the prompt
ends in them is a guess. The prompt may have images, as in `rlframework.datasets.pictures`.

An answer whose steps are labelled has the columns `prompt`, `completions` (the steps, a list of texts), and `labels`:
`prompt` is a text or a list of messages; a label is true or false, or a number from 0 to 1, the probability that the
step is right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlframework.base.errors import DataError
from rlframework.datasets.conversations import is_missing, read_tools, read_turns
from rlframework.datasets.pictures import PictureReader
from rlframework.datasets.sources.memory import RowSequence, given_rows
from rlframework.datasets.sources.opening import open_rows
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import Content, Message, text_of
from rlframework_preferences.config import PreferenceColumnsConfig
from rlframework_preferences.pairs import PreferenceRow, is_score

LAYOUTS = (
    "prompt + chosen + rejected; chosen + rejected as conversations; conversations + chosen + rejected (ShareGPT); "
    "input + preferred_output + non_preferred_output (OpenAI)"
)
"""The layouts, for messages."""

COLUMNS = PreferenceColumnsConfig()
"""The usual names of columns."""


def read_preferences(source: str | Path | RowSequence, pictures: PictureReader | None = None) -> list[PreferenceRow]:
    """Return the pairs of a file or data set (see `open_rows`), of a list of dictionaries, or of a `datasets.Dataset`.

    `pictures`: reads the images of prompts, which are not decoded; None: there may be none. Raises a `DataError` that
    names file and line of a row in none of the layouts, and logs as `check_pairs` does.
    """
    rows = open_rows(source) if isinstance(source, (str, Path)) else given_rows(source).train
    pairs = [preference_of(row, rows.where(n), rows.label(n), pictures=pictures) for n, row in enumerate(rows)]
    check_pairs(pairs, rows.where)
    return pairs


def preference_of(
    row: Mapping[str, Any],
    where: str,
    label: str = "",
    columns: PreferenceColumnsConfig = COLUMNS,
    pictures: PictureReader | None = None,
) -> PreferenceRow:
    """Return the pair in `row`, with the id `label`. Raises a `DataError` that begins with `where` if there is none.

    `pictures`: reads the images of the prompt; None: there may be none.
    """
    prompt, chosen, rejected = columns.prompt, columns.chosen, columns.rejected
    row = {name: value for name, value in row.items() if not is_missing(value)}
    if "preferred_output" in row or "non_preferred_output" in row:
        row = _from_openai(row, where)
        prompt, chosen, rejected = "input.messages", "preferred_output", "non_preferred_output"
    for name in (chosen, rejected):
        if name not in row:
            raise DataError(
                f"{where}: there is no {name!r}; the columns are {sorted(row)}. Set environment.columns to the names "
                f"of your columns, or use one of the layouts: {LAYOUTS}"
            )
    before = _prompt(row, prompt, where, pictures)
    (first, better), (second, worse) = (
        _answer(row[name], before, f"{where}, column {name!r}", pictures) for name in (chosen, rejected)
    )
    if _comparable(first) != _comparable(second):
        raise DataError(
            f"{where}: {chosen!r} and {rejected!r} have different prompts; conversations must differ in their last "
            "turn only"
        )
    if pictures is not None:
        names = [name for name in (columns.image, columns.images) if name in row]
        supply = [each for name in names for each in pictures.of(row[name], f"{where}, column {name!r}")]
        first = pictures.placed([*first, better, worse], supply, where)[:-2]
    tools = read_tools(row.get("tools"), f"{where}, column 'tools'")
    return PreferenceRow(tuple(first), text_of(better), text_of(worse), label, _scores(row, where), tools)


def _from_openai(row: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`row` with the parts of `input` as columns."""
    given = row.get("input")
    if not isinstance(given, Mapping) or is_missing(given.get("messages")):
        raise DataError(f"{where}, column 'input': must be an object with 'messages'. The layouts are: {LAYOUTS}")
    return {**row, "input.messages": given["messages"], "tools": given.get("tools")}


def _prompt(row: Mapping[str, Any], prompt: str, where: str, pictures: PictureReader | None) -> list[Message]:
    """The messages before the answers, as far as a column of their own has them."""
    for name in (prompt, "conversations", "messages"):
        if name in row:
            return read_turns(row[name], "user", f"{where}, column {name!r}", pictures)
    return []


def _comparable(turns: list[Message]) -> list[Any]:
    """`turns` with the sources of images in their places: an image is equal to itself only."""

    def shown(content: Content) -> Any:
        if isinstance(content, str):
            return content
        return [part["image"].source if part["type"] == "image" else part for part in content]

    return [{**turn, "content": shown(turn["content"])} for turn in turns]


def _answer(
    value: Any, before: list[Message], where: str, pictures: PictureReader | None
) -> tuple[list[Message], Message]:
    """The messages before an answer, and the answer; `value` may have them all, or the answer alone."""
    turns = read_turns([value] if isinstance(value, Mapping) else value, "assistant", where, pictures)
    if turns[0]["role"] != "assistant" and len(turns) > 1:
        if before and _comparable(turns[-1 - len(before) : -1]) != _comparable(before):
            raise DataError(f"{where}: the conversation does not have the prompt of the row before its last turn")
        before, turns = turns[:-1], turns[-1:]
    answer = turns[-1]
    if len(turns) > 1 or answer["role"] != "assistant" or answer.keys() - {"role", "content"} or not text_of(answer):
        raise DataError(
            f"{where}: must end with one turn of the assistant, in plain text, after the prompt; it ends with the "
            f"turns {[turn['role'] for turn in turns]}"
        )
    if not before:
        raise DataError(f"{where}: the answer has no prompt before it. The layouts are: {LAYOUTS}")
    return before, answer


def _scores(row: Mapping[str, Any], where: str) -> tuple[float, float] | None:
    given = [row[name] for name in ("score_chosen", "score_rejected") if name in row]
    if "margin" in row:
        if given or not _is_number(row["margin"]):
            raise DataError(
                f"{where}: margin must be a number, finite in fp32, without score_chosen and score_rejected beside it"
            )
        return float(row["margin"]), 0.0
    if not given:
        return None
    if len(given) != 2 or not all(map(_is_number, given)):
        raise DataError(
            f"{where}: score_chosen and score_rejected must both be numbers, finite in fp32, or both be absent"
        )
    return float(given[0]), float(given[1])


def _is_number(value: Any) -> bool:
    return is_score(value) and not isinstance(value, bool)


_LOG = logging.getLogger(__name__)


def check_pairs(pairs: Sequence[PreferenceRow], where: Callable[[int], str]) -> None:
    """Log how many of `pairs` have equal answers or scores in the wrong order; `where` names a pair by its number.

    Published data sets have some of both, so these pairs stay. Raises a `DataError` if the answers of all are equal.
    """
    equal = [number for number, pair in enumerate(pairs) if pair.chosen == pair.rejected]
    if equal:
        what = f"{len(equal):,} of {len(pairs):,} pairs have the same text as chosen and as rejected answer"
        if len(equal) == len(pairs):
            raise DataError(f"{where(0)}: {what}, so there is nothing to learn; use the columns of different answers")
        _LOG.warning("%s, which teach nothing; the first: %s. Remove them", what, where(equal[0]))
    worse = [number for number, pair in enumerate(pairs) if pair.scores is not None and pair.scores[0] < pair.scores[1]]
    if worse:
        _LOG.warning(
            "%s of %s pairs have a chosen answer with a lower score than the rejected one; the first: %s. %s",
            f"{len(worse):,}",
            f"{len(pairs):,}",
            where(worse[0]),
            "Is a low score a good one? Otherwise exchange the columns (environment.columns)"
            if len(worse) == len(pairs)
            else "Exchange the answers of these pairs, or remove them",
        )


FIELDS = ("prompt", "completions", "labels")


def has_steps(row: Mapping[str, Any]) -> bool:
    """Whether `row` has labelled steps."""
    return row.keys() >= {"completions", "labels"}


def steps_of(row: Mapping[str, Any], where: str, label: str) -> Sample:
    """Return the answer in `row` with the id `label`; its steps and their labels are in the sample's metadata.

    Raises a `DataError` that begins with `where` if something is missing or malformed.
    """
    if missing := [name for name in FIELDS if row.get(name) is None]:
        raise DataError(f"{where}: there is no {missing[0]!r}; labelled steps need the columns {', '.join(FIELDS)}")
    messages = tuple(read_turns(row["prompt"], "user", f"{where}, column 'prompt'"))
    steps, labels = row["completions"], row["labels"]
    if not isinstance(steps, (list, tuple)) or not steps:
        given = "and is empty" if isinstance(steps, (list, tuple)) else f"not {type(steps).__name__}"
        raise DataError(f"{where}, column 'completions': must be a list of texts, one for each step, {given}")
    for number, step in enumerate(steps, 1):
        if not isinstance(step, str) or not step:
            raise DataError(
                f"{where}, column 'completions': step {number} is {step!r:.200}; each must be a text, and not empty"
            )
    if not isinstance(labels, (list, tuple)) or len(labels) != len(steps) or not all(map(_is_label, labels)):
        raise DataError(
            f"{where}, column 'labels': must have a label for each of the {len(steps)} steps, true or false, or a "
            f"number from 0 to 1; it is {labels!s:.200}"
        )
    metadata = {"steps": tuple(steps), "labels": tuple(float(one) for one in labels)}
    return Sample(label, messages, "", "\n".join(steps), metadata)


def _is_label(value: Any) -> bool:
    return isinstance(value, (bool, int, float)) and 0 <= value <= 1
