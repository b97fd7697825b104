"""The Responses API: items in, items out, as JSON and as server-sent events."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import count
from typing import Any

from rlframework.interfaces.messages import Message
from rlframework_serve.bodies import ApiError
from rlframework_serve.chat import Reply, usage
from rlframework_serve.image_parts import TEXT_ONLY, ImageReader
from rlframework_serve.request_bodies import (
    IGNORED,
    TurnRequest,
    call_of,
    content_of,
    integer,
    messages_of,
    parts_of,
    reject_unknown,
    require_text_format,
    tools_of,
    turn_request,
)
from rlframework_serve.sampling import Choice
from rlframework_serve.sessions import Session

_KEYS = IGNORED | {
    "input", "instructions", "tools", "tool_choice", "max_output_tokens", "temperature", "top_p", "text",
    "previous_response_id", "include", "truncation",
}  # fmt: skip


def responses_request(body: Mapping[str, Any], session: Session, images: ImageReader = TEXT_ONLY) -> TurnRequest:
    """Return the turn that the body of a response asks for. Raises `ApiError` for what is not served."""
    reject_unknown(body, _KEYS)
    text = body.get("text")
    if text is not None:
        require_text_format(text.get("format") if isinstance(text, Mapping) else text, "text.format")
    if body.get("truncation") not in (None, "disabled"):
        raise ApiError("truncation: conversations are not shortened; it must be disabled or left out")
    name = body.get("previous_response_id")
    messages = [*(() if name is None else session.response(name)), *_input(body.get("input"), images)]
    if instructions := content_of(body.get("instructions"), "instructions"):
        messages.insert(0, {"role": "system", "content": instructions})
    checked, tools = messages_of(messages), tools_of(body.get("tools"), body.get("tool_choice"), lambda tool: tool)
    return turn_request(body, checked, tools, integer(body, "max_output_tokens", 1, 2**31))


def _input(given: Any, images: ImageReader) -> list[Message]:
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    if not isinstance(given, list):
        raise ApiError("input must be a text, or a list of items")
    found: list[Message] = []
    for position, item in enumerate(given):
        _add_item(found, item, f"input[{position}]", images)
    return found


def _add_item(found: list[Message], item: Any, where: str, images: ImageReader) -> None:
    """Append an item; the text and the function calls of one turn of the assistant are one message."""
    if not isinstance(item, Mapping):
        raise ApiError(f"{where} must be an object")
    kind = item.get("type", "message")
    if kind == "function_call_output":
        found.append(
            {
                "role": "tool",
                "content": parts_of(item.get("output"), "tool", where, images),
                "tool_call_id": str(item.get("call_id")),
            }
        )
    elif kind == "function_call":
        call = call_of(item.get("call_id"), item.get("name"), item.get("arguments"), where)
        if not found or found[-1]["role"] != "assistant":
            found.append({"role": "assistant", "content": ""})
        found[-1]["tool_calls"] = [*found[-1].get("tool_calls", ()), call]
    elif kind == "message":
        role = str(item.get("role"))
        found.append({"role": role, "content": parts_of(item.get("content"), role, where, images)})
    elif kind != "reasoning":  # which is known from the turn's tokens
        raise ApiError(f"{where} has the type {kind!r:.80}; it must be message, function_call or function_call_output")


class ResponsesReply(Reply[Choice]):
    """One reply. `body`: the request."""

    def __init__(self, body: Mapping[str, Any], model: str) -> None:
        self.id = f"resp_{secrets.token_hex(12)}"
        tools, instructions = body.get("tools") or [], body.get("instructions")
        self._head: dict[str, Any] = {
            "id": self.id, "object": "response", "created_at": int(time.time()), "model": model, "tools": tools,
            "instructions": instructions, "tool_choice": body.get("tool_choice") or "auto",
            "parallel_tool_calls": True, "metadata": {}, "error": None, "incomplete_details": None,
            "temperature": body.get("temperature"), "top_p": body.get("top_p"),
            "previous_response_id": body.get("previous_response_id"),
        }  # fmt: skip
        self._numbers = count()

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """Return the reply as one object."""
        return self._finished(choices[0], _items(choices[0]))

    def begin(self) -> Iterator[str]:
        """Return the events before anything is sampled."""
        response = {**self._head, "status": "in_progress", "output": [], "usage": None}
        yield self._event("response.created", response=response)
        yield self._event("response.in_progress", response=response)

    def events(self, choices: Sequence[Choice]) -> Iterator[str]:
        """Return the events of a sampled turn, whose texts come as a whole."""
        items = _items(choices[0])
        for index, item in enumerate(items):
            yield from self._item_events(index, item)
        response = self._finished(choices[0], items)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: Mapping[str, Any]) -> Iterator[str]:
        """Return the events of a turn that could not be sampled."""
        found = error["error"]
        yield self._event("error", code=found["code"], message=found["message"], param=None)

    def _item_events(self, index: int, item: dict[str, Any]) -> Iterator[str]:
        where = {"item_id": item["id"], "output_index": index}
        empty: dict[str, Any] = {"content": []} if item["type"] == "message" else {"arguments": ""}
        started = {**item, "status": "in_progress", **empty}
        yield self._event("response.output_item.added", output_index=index, item=started)
        if item["type"] == "message":
            part, where = item["content"][0], {**where, "content_index": 0}
            yield self._event("response.content_part.added", part={**part, "text": ""}, **where)
            yield self._event("response.output_text.delta", delta=part["text"], logprobs=[], **where)
            yield self._event("response.output_text.done", text=part["text"], logprobs=[], **where)
            yield self._event("response.content_part.done", part=part, **where)
        else:
            text = item["arguments"]
            yield self._event("response.function_call_arguments.delta", delta=text, **where)
            yield self._event("response.function_call_arguments.done", arguments=text, name=item["name"], **where)
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _finished(self, choice: Choice, items: list[dict[str, Any]]) -> dict[str, Any]:
        cut = choice.finish_reason == "length"
        used = usage([choice])
        return {
            **self._head,
            "status": "incomplete" if cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "output": items,
            "usage": {
                "input_tokens": used["prompt_tokens"],
                "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
                "output_tokens": used["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": used["total_tokens"],
            },
        }

    def _event(self, kind: str, **fields: Any) -> str:
        event = {"type": kind, "sequence_number": next(self._numbers), **fields}
        return f"event: {kind}\ndata: {json.dumps(event)}\n\n"


def _items(choice: Choice) -> list[dict[str, Any]]:
    message = choice.message
    calls = message.get("tool_calls", ())
    found: list[dict[str, Any]] = []
    if message["content"] or not calls:
        part = {"type": "output_text", "text": message["content"], "annotations": [], "logprobs": []}
        found.append(
            {"id": _name("msg"), "type": "message", "role": "assistant", "status": "completed", "content": [part]}
        )
    for call in calls:
        function = call["function"]
        found.append(
            {"id": _name("fc"), "type": "function_call", "status": "completed", "call_id": call["id"], **function}
        )
    return found


def _name(kind: str) -> str:
    return f"{kind}_{secrets.token_hex(12)}"
