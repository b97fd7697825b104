"""Read preference pairs from rows in the common published layouts.

| layout | columns |
| --- | --- |
| prompt and answers | `prompt`, `chosen`, `rejected`: texts, or lists of messages |
| conversations | `chosen`, `rejected`: lists of messages that differ in the last turn, with or without `prompt` |
| ShareGPT | `conversations`: a list of `{from, value}`; `chosen`, `rejected`: one such turn each |
| OpenAI | `input`: `{messages, tools}`; `preferred_output`, `non_preferred_output`: a list with one message each |

A column `tools` has the tools that the conversation has, `score_chosen` and `score_rejected` the scores of the answers,
or `margin` their difference.
Both answers are plain text, in one turn of the assistant. Two texts without a prompt are rejected: where the prompt
ends in them is a guess. The prompt may have images, as in `rlframework.datasets.pictures`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlframework.base.errors import DataError
from rlframework.datasets.conversations import is_missing, read_turns
from rlframework.datasets.pair_checks import check_pairs
from rlframework.datasets.pictures import PictureReader
from rlframework.datasets.preferences import PreferenceRow, is_score
from rlframework.datasets.sources.memory import RowSequence, given_rows
from rlframework.datasets.sources.opening import open_rows
from rlframework.datasets.tool_rows import read_tools
from rlframework.interfaces.messages import Content, Message, text_of

LAYOUTS = (
    "prompt + chosen + rejected; chosen + rejected as conversations; conversations + chosen + rejected (ShareGPT); "
    "input + preferred_output + non_preferred_output (OpenAI)"
)
"""The layouts, for messages."""


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
    *,
    prompt: str = "prompt",
    chosen: str = "chosen",
    rejected: str = "rejected",
    image: str = "image",
    images: str = "images",
    pictures: PictureReader | None = None,
) -> PreferenceRow:
    """Return the pair in `row`, with the id `label`. Raises a `DataError` that begins with `where` if there is none.

    `prompt`, `chosen`, `rejected`, `image` and `images` are the names of these columns. `pictures`: reads the images of
    the prompt; None: there may be none.
    """
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
        names = [name for name in (image, images) if name in row]
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
