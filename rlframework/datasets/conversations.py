"""Convert rows in the common published shapes to conversations.

| shape | columns |
| --- | --- |
| messages | `messages`: a list of `{role, content}` |
| ShareGPT | `conversations`: a list of `{from, value}` (or of `{role, content}`) |
| prompt and completion | `prompt` and `completion`: texts, or lists of messages |
| question and answer | `question`, and `answer`, which is also the completion |
| text | `text`: plain text, all of it trained on |

The first shape whose columns a row has is used; shapes with a renamed column come first. Messages may have tool calls
and reasoning as in OpenAI's format, and a column `tools` the tools that the conversation has. Contents are texts, and
images if they are asked for; other parts are rejected, never dropped silently. Files of tables (Parquet, Arrow) give
all tools and calls the same keys, with null for the absent ones, so null values are dropped; those in arguments that
are JSON text are kept.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, cast

from rlframework.base.errors import DataError
from rlframework.config.environments import ColumnsConfig
from rlframework.datasets.nested_columns import nested_values, verl_answer
from rlframework.datasets.pictures import KINDS, PictureReader
from rlframework.interfaces.messages import Content, ContentPart, Message, TextPart, ToolCall, ToolSpec, text_of

_ROLES = {
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bot", "model", "bing", "bard"), "assistant"),
    **dict.fromkeys(("tool", "function", "observation", "function_response", "ipython"), "tool"),
}


@dataclass(frozen=True)
class Conversation:
    """A row: the `messages` before the last assistant turn, that turn as `completion`, and the gold `answer`, if any.

    `completion` is empty if the conversation does not end with the assistant, or with a turn that is more than text:
    that turn is then the last of `messages`. Without messages, it is plain text. `tools`: what the assistant may call.
    """

    messages: tuple[Message, ...]
    completion: str = ""
    answer: str | None = None
    tools: tuple[ToolSpec, ...] = ()


def conversation_of(
    row: Mapping[str, Any], columns: ColumnsConfig, where: str, pictures: PictureReader | None = None
) -> Conversation:
    """Return the conversation in `row`. Raises a `DataError` that begins with `where` if the row does not fit.

    Numbers are converted to text; null and NaN count as missing. `pictures`: reads the images; None: there may be none.
    """
    row = {**row, **nested_values(row, columns.renamed, where)}
    row = {name: None if is_missing(value) else value for name, value in row.items()}
    shape = _shape(row, columns, where)
    place = f"{where}, column {shape!r}"
    if shape == columns.text:
        turns: list[Message] = [{"role": "assistant", "content": _text(row[shape], place)}]
    elif shape in (columns.messages, columns.conversations):
        turns = _messages(row[shape], place, pictures)
    else:
        turns = read_turns(row[shape], "user", place, pictures)
        replies = (columns.completion, columns.answer)  # the gold answer if there is no other
        reply = next((name for name in replies if name != shape and row.get(name) is not None), None)
        if reply is not None:
            turns += read_turns(row[reply], "assistant", f"{where}, column {reply!r}")
    if pictures is not None:
        columns_of_images = [name for name in (columns.image, columns.images) if row.get(name) is not None]
        supply = [image for name in columns_of_images for image in pictures.of(row[name], f"{where}, column {name!r}")]
        turns = pictures.placed(turns, supply, where)
    gold = _gold(row, columns.answer, where)
    tools = read_tools(row.get(columns.tools), f"{where}, column {columns.tools!r}")
    if turns[-1]["role"] != "assistant" or turns[-1].keys() - {"role", "content"}:
        return Conversation(tuple(turns), "", gold, tools)
    if not text_of(turns[-1]):
        what = "text" if shape == columns.text else "last assistant turn"
        raise DataError(f"{where}: the {what} is empty; remove such rows")
    return Conversation(tuple(turns[:-1]), text_of(turns[-1]), gold, tools)


def _gold(row: Mapping[str, Any], column: str, where: str) -> str | None:
    """The reference answer in `column`, or without that column where verl's rows have it: as text, lists as JSON."""
    if column in row:
        return None if row[column] is None else _plain(row[column], f"{where}, column {column!r}")
    answer = verl_answer(row)
    if isinstance(answer, (list, Mapping)):
        return json.dumps(answer, default=str)
    return None if is_missing(answer) else _plain(answer, f"{where}, column 'reward_model', key 'ground_truth'")


def _shape(row: Mapping[str, Any], columns: ColumnsConfig, where: str) -> str:
    """The column that determines the shape: the first one with a value."""
    missing = [name for name in columns.renamed if name not in row]
    if missing:
        raise DataError(f"{where}: there is no column {missing[0]!r}; the columns are {sorted(row)}")
    for name in columns.starts:
        if row.get(name) is not None:
            return name
    if empty := next((name for name in columns.starts if name in row), None):
        raise DataError(f"{where}: the column {empty!r} has no value; remove such rows, or set environment.columns")
    raise DataError(
        f"{where}: no conversation in the columns {sorted(row)}; one of {list(columns.starts)} must have a value. Set "
        "environment.columns to the names of your columns"
    )


def read_turns(value: Any, role: str, where: str, pictures: PictureReader | None = None) -> list[Message]:
    """Return one side of a conversation: a list of messages, or a text or number, which becomes a turn of `role`.

    Raises a `DataError` that begins with `where` for anything else.
    """
    if isinstance(value, list):
        return _messages(value, where, pictures)
    return [{"role": role, "content": _plain(value, where)}]


def _messages(value: Any, where: str, pictures: PictureReader | None = None) -> list[Message]:
    if not isinstance(value, list) or not value:
        given = "an empty list" if value == [] else type(value).__name__
        raise DataError(f"{where}: must be a list of messages, not {given}")
    return [_message(turn, f"{where}, turn {number}", pictures) for number, turn in enumerate(value, 1)]


def _message(turn: Any, where: str, pictures: PictureReader | None) -> Message:
    if not isinstance(turn, Mapping):
        raise DataError(f"{where}: must be an object with 'role' and 'content', not {type(turn).__name__}")
    given = {key: value for key, value in turn.items() if not is_missing(value)}  # Arrow adds absent keys as null
    role, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    if role is None:
        raise DataError(f"{where}: needs 'role' and 'content' (or 'from' and 'value'); it has {sorted(given)}")
    if not isinstance(role, str) or role.lower() not in _ROLES:
        raise DataError(f"{where}: unknown role {role!r}; it must be one of {sorted(_ROLES)}")
    further = structured_parts(given, where)
    if content is None and "tool_calls" not in further:
        if empty := next((key for key in ("content", "value") if key in turn and is_missing(turn[key])), None):
            raise DataError(f"{where}: its {empty!r} is null; give it a text, or remove such rows")
        raise DataError(f"{where}: needs 'role' and 'content' (or 'from' and 'value'); it has {sorted(given)}")
    content = "" if content is None else _content(content, where, pictures)
    turn = {"role": _ROLES[role.lower()], "content": content, **further}
    if further.keys() & {"tool_calls", "reasoning_content"} and turn["role"] != "assistant":
        raise DataError(f"{where}: only assistant turns have tool calls and reasoning, not {role!r}")
    return cast("Message", turn)


def _content(content: Any, where: str, pictures: PictureReader | None) -> Content:
    """`content` as text, or as parts if it has images and there may be some."""
    parts = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    if pictures is None or not any(isinstance(part, Mapping) and part.get("type") in KINDS for part in parts):
        return _text(content, where)
    found: list[ContentPart] = []
    for number, part in enumerate(parts, 1):
        if isinstance(part, Mapping) and part.get("type") in KINDS:
            given = {key: value for key, value in part.items() if not is_missing(value)}
            found += pictures.parts(given, f"{where}, part {number}")
        else:
            found.append(TextPart(type="text", text=_text([part], f"{where}, part {number}")))
    return found


def _text(content: Any, where: str) -> str:
    """`content` itself, or the joined texts of a list of content parts."""
    if isinstance(content, str):
        return _without_surrogates(content, where)
    if isinstance(content, Sequence) and all(isinstance(part, Mapping) for part in content):
        kinds = sorted({str(part.get("type")) for part in content} - {"text"})
        if not kinds and all(isinstance(part.get("text"), str) for part in content):
            return _without_surrogates("".join(part["text"] for part in content), where)
        images = "; for images, set environment.images={}" if set(kinds) <= set(KINDS) else ""
        raise DataError(f"{where}: content parts of type {kinds} are not supported, only text{images}")
    raise DataError(f"{where}: the content must be text, not {type(content).__name__}")


def _plain(value: Any, where: str) -> str:
    """Text, or a number as text, as answers often are."""
    if isinstance(value, str):
        return _without_surrogates(value, where)
    number = number_text(value)
    if number is None:
        given = value if isinstance(value, (float, Decimal)) else type(value).__name__
        raise DataError(f"{where}: must be text or a number, not {given}")
    return number


def _without_surrogates(text: str, where: str) -> str:
    half = lone_surrogate(text)
    if half is not None:
        raise DataError(
            f"{where}: the text has a lone surrogate ({half}), half of a character; fix it, or remove such rows"
        )
    return text


def is_missing(value: Any) -> bool:
    """Whether `value` is missing: null or NaN, which tables use for absent values."""
    return value is None or (isinstance(value, (float, Decimal)) and math.isnan(value))


def number_text(value: Any) -> str | None:
    """Return a number as text, integers without a fraction; None for infinities and values that are not numbers."""
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, (float, Decimal)) or not math.isfinite(value):
        return None
    if isinstance(value, float) and abs(value) >= 2**53:  # not exact
        return str(value)
    if value == int(value):
        return str(int(value))
    return str(value) if isinstance(value, float) else format(value, "f")


def lone_surrogate(text: str) -> str | None:
    """Return the first lone surrogate in `text` as an escape such as "\\ud83d", or None. No tokenizer accepts one."""
    if text.isascii():
        return None
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        return f"\\u{ord(text[error.start]):04x}"
    return None


def with_texts(messages: tuple[Message, ...], system: str | None, instruction: str) -> tuple[Message, ...]:
    """Append `instruction` to the last user turn, and put `system` first unless there is a system message."""
    turns = list(messages)
    users = [number for number, message in enumerate(turns) if message["role"] == "user"]
    if users and instruction:
        content = turns[users[-1]]["content"]
        if isinstance(content, str):
            content += instruction
        else:
            content = [*content, TextPart(type="text", text=instruction)]
        turns[users[-1]] = {"role": "user", "content": content}
    if system is not None and turns and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system})
    return tuple(turns)


_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}}


def read_tools(value: Any, where: str) -> tuple[ToolSpec, ...]:
    """Return the tools of a conversation: a list of OpenAI's tools, or of their functions alone, or either as JSON.

    Raises a `DataError` that begins with `where` for anything else; None is no tools.
    """
    given = _loaded(value, where) if isinstance(value, str) else value
    if given is None:
        return ()
    if not isinstance(given, list):
        raise DataError(f"{where}: must be a list of tools, or one as JSON, not {type(given).__name__}")
    return tuple(_tool(without_nulls(tool), f"{where}, tool {number}") for number, tool in enumerate(given, 1))


def structured_parts(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return what `message` has besides role and content: `tool_calls`, `reasoning_content`, `tool_call_id`, `name`.

    `function_call`, the older form, counts as one tool call. Raises a `DataError` that begins with `where`.
    """
    found: dict[str, Any] = {}
    calls = message.get("tool_calls") or [call for call in [message.get("function_call")] if call]
    if not isinstance(calls, list):
        raise DataError(f"{where}: tool_calls must be a list, not {type(calls).__name__}")
    if calls:
        found["tool_calls"] = [_call(call, number, where) for number, call in enumerate(calls)]
    for name in ("reasoning_content", "tool_call_id", "name"):
        if message.get(name):
            if not isinstance(message[name], str):
                raise DataError(f"{where}: {name} must be text, not {type(message[name]).__name__}")
            found[name] = message[name]
    return found


def without_nulls(value: Any) -> Any:
    """Return `value` without the keys of mappings whose value is null, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(each) for key, each in value.items() if each is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def _tool(tool: Any, where: str) -> ToolSpec:
    function = tool.get("function", tool) if isinstance(tool, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"{where}: must be an object with the name of a function, not {tool!r:.80}")
    parameters = function.get("parameters", _NO_ARGUMENTS)
    if not isinstance(parameters, Mapping):
        raise DataError(f"{where}: parameters must be a JSON schema, an object, not {type(parameters).__name__}")
    description = str(function.get("description", ""))
    return {
        "type": "function",
        "function": {"name": function["name"], "description": description, "parameters": parameters},
    }


def _call(call: Any, number: int, where: str) -> ToolCall:
    place = f"{where}, tool call {number + 1}"
    function = call.get("function", call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str) or not function["name"]:
        raise DataError(f"{place}: must name a function and its arguments, not {call!r:.80}")
    given = function.get("arguments") or {}
    arguments = _loaded(given, f"{place}, arguments") if isinstance(given, str) else without_nulls(given)
    if not isinstance(arguments, Mapping):
        raise DataError(f"{place}: the arguments must be a JSON object, not {arguments!r:.80}")
    text = json.dumps(arguments, ensure_ascii=False)
    identity = str(call.get("id") or f"call_{number}")
    return {"id": identity, "type": "function", "function": {"name": function["name"], "arguments": text}}


def _loaded(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where}: is not JSON ({error})") from error
