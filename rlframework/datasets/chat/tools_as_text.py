"""Conversations for chat templates that know no tools: their descriptions, calls and results as text.

The text has the Hermes format, which `reply_parser` reads where a template has none of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby

from rlframework.interfaces.messages import Message, ToolCall, ToolSpec, text_of


def tools_as_text(messages: Sequence[Message], tools: Sequence[ToolSpec], *, role: str = "system") -> list[Message]:
    """Return `messages` without calls and tool results, which become text, and with a description of `tools`.

    Results become user messages, one for those that follow one another, since templates may want roles to alternate.
    The system message describes the tools. Without one, the first message does, of the role `role`: system, or user
    where the template has no system role.
    """
    plain: list[Message] = []
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        some = list(group)
        plain += [_results_as_text(some)] if are_results else [_turn_as_text(message) for message in some]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these tools:\n{listed}\n"
        'Call one by writing <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.'
    )
    first = plain[0] if plain else None
    if first and first["role"] == "system":
        return [{**first, "content": f"{text_of(first)}\n\n{text}"}, *plain[1:]]
    if first and first["role"] == role:
        return [{**first, "content": f"{text}\n\n{text_of(first)}"}, *plain[1:]]
    return [{"role": role, "content": text}, *plain]


def _results_as_text(results: Sequence[Message]) -> Message:
    texts = [f"<tool_response>\n{text_of(message)}\n</tool_response>" for message in results]
    return {"role": "user", "content": "\n".join(texts)}


def _turn_as_text(message: Message) -> Message:
    if "tool_calls" not in message:
        return message
    text = text_of(message)
    for call in message["tool_calls"]:
        text = f"{text}\n<tool_call>\n{_call_as_text(call)}\n</tool_call>".lstrip("\n")
    plain: Message = {"role": message["role"], "content": text}
    if "reasoning_content" in message:
        plain["reasoning_content"] = message["reasoning_content"]
    return plain


def _call_as_text(call: ToolCall) -> str:
    """The JSON of a call; arguments that are not JSON are a text in it. Halves of characters are replaced."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        text = json.dumps({"name": name, "arguments": json.loads(arguments)}, ensure_ascii=False)
    except (ValueError, RecursionError):
        text = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return text.encode("utf-8", "replace").decode()
