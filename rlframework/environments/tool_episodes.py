"""Episodes with tools: a turn with tool calls is answered by the tools, one without is the answer and scored."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import Any, cast

from rlframework.interfaces.environment import Episode, Sample, StepOutcome
from rlframework.interfaces.messages import Message, ToolCall, ToolSpec, encodable, text_of

MAX_ARGUMENT_CHARACTERS = 1_000_000
"""Arguments longer than this are refused unread."""


_REFUSED = "error: "


class RejectedCall(ValueError):
    """A tool call cannot be made; the text is the reason, written for the model."""


def answer(call: ToolCall, text: str, limit: int | None = None) -> Message:
    """Return the tool message with the result `text` of `call`, of which at most `limit` characters are kept."""
    if limit is not None and len(text) > limit:
        text = f"{text[:limit]}\n[cut: the first {limit} of {len(text)} characters]"
    name = encodable(call["function"]["name"])
    return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": encodable(text)}


def refusal(call: ToolCall, reason: object, limit: int | None = None) -> Message:
    """Return the tool message that says why `call` was not made or failed."""
    return answer(call, f"{_REFUSED}{reason}", limit)


def is_refusal(message: Mapping[str, Any]) -> bool:
    """Whether `message` answers a tool call that was not made or failed, as `refusal` does."""
    return message["role"] == "tool" and text_of(cast("Message", message)).startswith(_REFUSED)


def require_known(name: str, names: Collection[str]) -> None:
    """Raise `RejectedCall` unless `name` is one of the tools `names`."""
    if name not in names:
        known = ", ".join(names) if names else "none"
        given = f"no tool {name[:80]!r}" if name else "no name of a tool in this call"
        raise RejectedCall(f"there is {given}; the tools are: {known}")


def object_of(call: ToolCall) -> dict[str, Any]:
    """Return the arguments of `call`, a JSON object; empty arguments are an empty object.

    Raises `RejectedCall` for anything else, including NaN and infinity, which JSON does not have.
    """
    name, text = call["function"]["name"], call["function"]["arguments"]
    if not isinstance(text, str):
        raise RejectedCall(f"the arguments of {name!r} are not text with a JSON object, but {type(text).__name__}")
    if len(text) > MAX_ARGUMENT_CHARACTERS:
        raise RejectedCall(f"the arguments of {name!r} have {len(text)} characters; at most {MAX_ARGUMENT_CHARACTERS}")
    try:
        found = json_value(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise RejectedCall(f"the arguments of {name!r} are not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise RejectedCall(f"the arguments of {name!r} are not a JSON object, but {text.strip()[:80]}")
    return found


def json_value(text: str | bytes | bytearray) -> Any:
    """Return the value of JSON `text`. Raises a `ValueError` also for NaN and infinity, which JSON does not have."""
    return json.loads(text, parse_constant=_no_number)


def names_of(tools: Collection[ToolSpec]) -> tuple[str, ...]:
    """Return the names of `tools`, in order."""
    return tuple(tool["function"]["name"] for tool in tools)


def spec(name: str, description: str, parameters: Mapping[str, Any]) -> ToolSpec:
    """Return the description of a tool; `parameters` is the JSON schema of its arguments."""
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


def is_whole(call: ToolCall) -> bool:
    """Whether `call` was written to its end: it has a name, and arguments that are a JSON object."""
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    return bool(name and arguments.strip()) and not is_malformed(call, [spec(name, "", {})])


def is_malformed(call: ToolCall, tools: Sequence[ToolSpec]) -> bool:
    """Whether `call` names none of `tools`, or its arguments are not a JSON object."""
    try:
        require_known(call["function"]["name"], names_of(tools))
        object_of(call)
    except RejectedCall:
        return True
    return False


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


class ToolSession(ABC):
    """The tools of one episode, with their state."""

    @abstractmethod
    async def open(self) -> Sequence[ToolSpec]:
        """Start, and return the tools."""

    @abstractmethod
    async def call(self, call: ToolCall) -> Message:
        """Return the tool message that answers `call`. A call that cannot be made is answered with the reason."""

    async def close(self) -> None:
        """Release the session's resources. Called once, also without `open`."""


Score = Callable[[Sample, Message], Awaitable[StepOutcome]]
"""Scores an assistant message that calls no tool."""


class ToolEpisode(Episode):
    """An attempt at `sample` with the tools of `session`, until a turn calls no tool, which `score` scores.

    Calls of a turn are made one after the other; those beyond the first `max_calls` are refused.
    """

    def __init__(self, sample: Sample, session: ToolSession, score: Score, *, max_calls: int) -> None:
        self._sample, self._session, self._score, self._max_calls = sample, session, score, max_calls

    async def reset(self) -> Sequence[Message]:
        """Open the session, and return the sample's messages."""
        self.tools = tuple(await self._session.open())
        return self._sample.messages

    async def step(self, message: Message) -> StepOutcome:
        """Answer the tool calls of `message`, each by one tool message in order; score it if there are none."""
        calls = message.get("tool_calls", ())
        if not calls:
            return await self._score(self._sample, message)
        answers = [await self._answer(call) for call in calls[: self._max_calls]]
        reason = f"too many calls in one turn; the first {self._max_calls} were made"
        refused = [refusal(call, reason) for call in calls[self._max_calls :]]
        return StepOutcome(0.0, done=False, observations=(*answers, *refused))

    async def _answer(self, call: ToolCall) -> Message:
        try:
            return await self._session.call(call)
        except asyncio.CancelledError as error:
            error.add_note(f"it was in a call of the tool {call['function']['name']!r:.100}")
            raise

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()
