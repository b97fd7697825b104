"""Rows in the shapes that people publish, as conversations.

| shape | columns |
| --- | --- |
| messages | `messages`: a list of `{role, content}` |
| ShareGPT | `conversations`: a list of `{from, value}` (or of `{role, content}`) |
| prompt and completion | `prompt` and `completion`: texts, or lists of messages |
| question and answer | `question`, and `answer`, which is the completion too |
| text | `text`: no conversation, all of it is learnt |

The first shape whose columns a row has is taken, a shape with a renamed column before the others. Contents are texts;
pictures, sound and tool calls are refused, not left out in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from rlframework.datasets.text_values import is_missing, lone_surrogate, number_text
from rlframework.errors import DataError
from rlframework.interfaces.environment import Message

if TYPE_CHECKING:
    from rlframework.config.environments import ColumnsConfig

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "ipython"), "tool"),
}


@dataclass(frozen=True)
class Conversation:
    """One row: the `messages` before the answer, the last assistant turn as `completion`, and the gold `answer`.

    `completion` is empty where the conversation does not end with the assistant, `answer` None where there is none.
    Without messages, the completion is plain text.
    """

    messages: tuple[Message, ...]
    completion: str = ""
    answer: str | None = None


def conversation_of(row: Mapping[str, Any], columns: ColumnsConfig, where: str) -> Conversation:
    """The conversation in `row`; a `DataError` that begins with `where` says what does not fit.

    Numbers are read as texts; one that is not a number (NaN) is no value, as null is none.
    """
    row = {name: None if is_missing(value) else value for name, value in row.items()}
    turns = _turns(row, columns, where)
    answer = row.get(columns.answer)
    gold = None if answer is None else _plain(answer, where, columns.answer)
    if turns is None:
        text = _text(row[columns.text], f"{where}, column {columns.text!r}")
        if not text:
            raise DataError(f"{where}: the text is empty; leave such rows out")
        return Conversation((), text, gold)
    if turns[-1]["role"] != "assistant":
        return Conversation(turns, "", gold)
    if not turns[-1]["content"]:
        raise DataError(f"{where}: the last assistant turn is empty; leave such rows out")
    return Conversation(turns[:-1], turns[-1]["content"], gold)


def _turns(row: Mapping[str, Any], columns: ColumnsConfig, where: str) -> tuple[Message, ...] | None:
    """All turns of `row`, at least one; None where it is plain text."""
    shape = _shape(row, columns, where)
    if shape == columns.text:
        return None
    if shape in (columns.messages, columns.conversations):
        turns = _messages(row[shape], f"{where}, column {shape!r}")
    else:
        reply = _reply_column(row, columns, shape)
        turns = _side(row[shape], "user", f"{where}, column {shape!r}")
        if reply is not None:
            turns += _side(row[reply], "assistant", f"{where}, column {reply!r}")
    return tuple(turns)


def _shape(row: Mapping[str, Any], columns: ColumnsConfig, where: str) -> str:
    """The column that tells the shape: the first there is with a value."""
    missing = [name for name in columns.renamed if name not in row]
    if missing:
        raise DataError(f"{where}: there is no column {missing[0]!r}; there are {sorted(row)}")
    for name in columns.starts:
        if row.get(name) is not None:
            return name
    raise DataError(
        f"{where}: no conversation in the columns {sorted(row)}; there must be one of {list(columns.starts)} with a "
        "value. Say under environment.columns what yours are called"
    )


def _reply_column(row: Mapping[str, Any], columns: ColumnsConfig, shape: str) -> str | None:
    """The column with the completion: the gold answer is one, where there is no other."""
    names = (columns.completion, columns.answer)
    return next((name for name in names if name != shape and row.get(name) is not None), None)


def _side(value: Any, role: str, where: str) -> list[Message]:
    """One side of a conversation: a text, which is a turn of `role`, or messages."""
    if isinstance(value, list):
        return _messages(value, where)
    return [{"role": role, "content": _plain(value, where)}]


def _messages(value: Any, where: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        given = "an empty list" if value == [] else type(value).__name__
        raise DataError(f"{where}: must be a list of messages, not {given}")
    return [_message(turn, f"{where}, turn {number}") for number, turn in enumerate(value)]


def _message(turn: Any, where: str) -> Message:
    if not isinstance(turn, Mapping):
        raise DataError(f"{where}: must be an object with 'role' and 'content', not {type(turn).__name__}")
    given = {key: value for key, value in turn.items() if not is_missing(value)}  # Arrow fills in what a turn lacks
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if given.get("tool_calls") or given.get("function_call"):
        raise DataError(f"{where}: calls of tools are not read; leave such rows out, or write them as text")
    if role is None or content is None:
        raise DataError(f"{where}: needs 'role' and 'content' (or 'from' and 'value'); it has {sorted(given)}")
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise DataError(f"{where}: the role {role!r} is not known; it must be one of {sorted(_ROLES)}")
    return {"role": _ROLES[role.lower()], "content": _text(content, where)}


def _text(content: Any, where: str) -> str:
    """`content`, or the texts of its parts, where it is a list of parts."""
    if isinstance(content, str):
        return _whole(content, where)
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content):
        kinds = sorted({str(part.get("type")) for part in content} - {"text"})
        if not kinds and all(isinstance(part.get("text"), str) for part in content):
            return _whole("".join(part["text"] for part in content), where)
        raise DataError(f"{where}: parts of the kinds {kinds} are not read, only text")
    raise DataError(f"{where}: the content must be text, not {type(content).__name__}")


def _plain(value: Any, where: str, column: str = "") -> str:
    """Text, or a number as text: answers often are."""
    place = f"{where}, column {column!r}" if column else where
    if isinstance(value, str):
        return _whole(value, place)
    number = number_text(value)
    if number is None:
        given = value if isinstance(value, (float, Decimal)) else type(value).__name__
        raise DataError(f"{place}: must be text or a number, not {given}")
    return number


def _whole(text: str, where: str) -> str:
    """`text`, without half a character in it."""
    half = lone_surrogate(text)
    if half is not None:
        raise DataError(f"{where}: there is half a character ({half}) in the text; mend it, or leave such rows out")
    return text
