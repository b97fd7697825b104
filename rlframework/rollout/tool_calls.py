"""The assistant turn that a completion's text holds: its reasoning, its content and its tool calls."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rlframework.environments.tool_episodes import encodable
from rlframework.interfaces.messages import FunctionCall, Message


@dataclass(frozen=True)
class ParsedCall:
    """A tool call as the model wrote it; `arguments` is text, JSON or not. `name` is empty if none was found."""

    name: str
    arguments: str

    @property
    def function(self) -> FunctionCall:
        """The call as a message has it; halves of characters, which JSON can spell, are replaced."""
        return {"name": encodable(self.name), "arguments": encodable(self.arguments)}


@dataclass(frozen=True)
class ParsedTurn:
    """The parts of an assistant turn. `reasoning` is None if the turn has none."""

    content: str
    reasoning: str | None = None
    calls: tuple[ParsedCall, ...] = ()

    def message(self, ids: list[str]) -> Message:
        """Return the turn as a message; `ids` are those of its tool calls, at least as many."""
        message: Message = {"role": "assistant", "content": self.content}
        if self.reasoning is not None:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [
                {"id": ids[number], "type": "function", "function": call.function}
                for number, call in enumerate(self.calls)
            ]
        return message


def call_of_json(text: str) -> ParsedCall:
    """Return the call that the JSON object `text` describes by `name` and `arguments` (Llama: `parameters`).

    If it describes none, the whole text is the call's arguments, so that the environment refuses it and says why.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return ParsedCall("", text.strip())
    return call_of(found, text)


def call_of(found: Any, text: str) -> ParsedCall:
    """Return the call that the JSON value `found` describes; `text` is how the model wrote it."""
    key = next((key for key in ("arguments", "parameters") if isinstance(found, dict) and key in found), None)
    if not isinstance(found, dict) or not isinstance(found.get("name"), str) or not found["name"]:
        return ParsedCall("", text.strip())
    arguments = {} if key is None else found[key]
    if isinstance(arguments, str):
        return ParsedCall(found["name"], arguments)
    try:
        return ParsedCall(found["name"], json.dumps(arguments))
    except RecursionError:  # read, but too deep to be written
        return ParsedCall("", text.strip())
