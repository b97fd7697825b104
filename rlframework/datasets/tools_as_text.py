"""Conversations for chat templates that know no tools: their descriptions, calls and results as text.

The text has the Hermes format, which `rlframework.rollout.reply_parser` reads where a template has none of its own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from rlframework.interfaces.messages import Message, ToolCall, ToolSpec, text_of


def tools_as_text(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[Message]:
    """Return `messages` without calls and tool results, which become text; `tools` are described in the system message.

    Results become user messages. Without a system message, one with the tools is put first.
    """
    plain = [_message_as_text(message) for message in messages]
    if not tools:
        return plain
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    text = (
        f"You may call these tools:\n{listed}\n"
        'Call one by writing <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.'
    )
    if plain and plain[0]["role"] == "system":
        return [{**plain[0], "content": f"{text_of(plain[0])}\n\n{text}"}, *plain[1:]]
    return [{"role": "system", "content": text}, *plain]


def _message_as_text(message: Message) -> Message:
    if message["role"] == "tool":
        return {"role": "user", "content": f"<tool_response>\n{text_of(message)}\n</tool_response>"}
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
    """The JSON of a call; arguments that are not JSON are a text in it."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    try:
        found = json.loads(arguments)
    except (ValueError, RecursionError):
        found = arguments
    return json.dumps({"name": name, "arguments": found}, ensure_ascii=False)
