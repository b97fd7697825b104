"""Parse the bodies of requests: what all APIs share, chat completions, and completions."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlframework.interfaces.messages import Content, ContentPart, Message, Picture, TextPart, ToolCall, ToolSpec
from rlframework_serve.bodies import ApiError
from rlframework_serve.image_parts import IMAGE_PARTS, TEXT_ONLY, ImageReader

MOST_CHOICES = 64
"""The largest `n` of a request."""

_MOST_STOPS = 16
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_TEXT_PARTS = ("text", "input_text", "output_text")

IGNORED = frozenset(
    {"metadata", "model", "parallel_tool_calls", "prompt_cache_key", "prompt_cache_retention", "reasoning",
     "reasoning_effort", "safety_identifier", "service_tier", "store", "stream", "stream_options", "user",
     "verbosity"}
)  # fmt: skip
"""Keys of both APIs that do not change what is sampled here, or are read elsewhere."""

_CHAT_KEYS = IGNORED | {
    "messages", "tools", "tool_choice", "n", "seed", "max_tokens", "max_completion_tokens", "temperature", "top_p",
    "stop", "logprobs", "top_logprobs", "response_format", "frequency_penalty", "presence_penalty", "logit_bias",
}  # fmt: skip

MOST_COMPLETIONS = 1024
"""The most completions of one request: its prompts times `n`."""

_DEFAULT_TOKENS = 16
"""OpenAI's `max_tokens` of a request without one."""

_MOST_TOP = 20

_COMPLETION_KEYS = IGNORED | {
    "prompt", "echo", "logprobs", "n", "seed", "max_tokens", "temperature", "top_p", "stop", "frequency_penalty",
    "presence_penalty", "logit_bias",
}  # fmt: skip

_END = 2**31
"""Beyond all token ids; which of them the model has is checked with the batch."""


@dataclass(frozen=True)
class TurnRequest:
    """A turn that a client asks for. None: the client did not say."""

    messages: tuple[Message, ...]
    tools: tuple[ToolSpec, ...] = ()
    choices: int = 1
    seed: int | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class CompletionRequest:
    """The completions that a client asks for: `turn.choices` of each of `prompts`, texts or token ids.

    `echo`: whether the prompt comes with its completions. `logprobs`: how many most likely tokens come with each token;
    None: no log-probabilities. `usage`: whether a stream ends with the numbers of tokens.
    """

    prompts: Sequence[str | list[int]]
    turn: TurnRequest
    echo: bool
    logprobs: int | None
    usage: bool = False

    @property
    def scored(self) -> bool:
        """Whether log-probabilities are asked for that are not known from sampling."""
        return self.logprobs is not None and (self.echo or self.logprobs > 0)


def chat_request(body: Mapping[str, Any], images: ImageReader = TEXT_ONLY) -> TurnRequest:
    """Return the turn that the body of a chat completion asks for. Raises `ApiError` for what is not served."""
    reject_unknown(body, _CHAT_KEYS)
    require_plain_sampling(body)
    if integer(body, "top_logprobs", 0, 20):
        raise ApiError(f"top_logprobs={body['top_logprobs']}: only sampled tokens have log-probabilities; leave it out")
    require_text_format(body.get("response_format"), "response_format")
    limits = [integer(body, key, 1, 2**31) for key in ("max_completion_tokens", "max_tokens")]
    return turn_request(
        body,
        messages_of(body.get("messages"), images),
        tools_of(body.get("tools"), body.get("tool_choice"), lambda tool: tool.get("function")),
        next((limit for limit in limits if limit is not None), None),
    )


def turn_request(
    body: Mapping[str, Any], messages: tuple[Message, ...], tools: tuple[ToolSpec, ...], max_tokens: int | None
) -> TurnRequest:
    """Return a turn with the sampling of `body`. Keys that an API does not have are absent there."""
    return TurnRequest(
        messages,
        tools,
        integer(body, "n", 1, MOST_CHOICES) or 1,
        integer(body, "seed", -(2**63), 2**63 - 1),
        max_tokens,
        number(body, "temperature", 0, 2),
        number(body, "top_p", 0, 1),
        stops_of(body.get("stop")),
    )


def completion_request(body: Mapping[str, Any]) -> CompletionRequest:
    """Return the completions that a body asks for. Raises `ApiError` for what is not served."""
    reject_unknown(body, _COMPLETION_KEYS)
    require_plain_sampling(body)
    echo, prompts, limit = body.get("echo"), _prompts(body.get("prompt")), integer(body, "max_tokens", 0, 2**31)
    if echo not in (None, True, False):
        raise ApiError(f"echo={echo!r:.80} must be true or false")
    if limit == 0 and not echo:
        raise ApiError("max_tokens=0 generates nothing; it needs echo=true, which returns the prompt")
    turn = turn_request(body, (), (), _DEFAULT_TOKENS if limit is None else limit)
    if (count := len(prompts) * turn.choices) > MOST_COMPLETIONS:
        raise ApiError(f"{len(prompts)} prompts times n={turn.choices} are {count}; the most is {MOST_COMPLETIONS}")
    return CompletionRequest(prompts, turn, bool(echo), integer(body, "logprobs", 0, _MOST_TOP), includes_usage(body))


def includes_usage(body: Mapping[str, Any]) -> bool:
    """Whether the client asks for the numbers of tokens at the end of a stream."""
    options = body.get("stream_options")
    return bool(isinstance(options, Mapping) and options.get("include_usage"))


def messages_of(given: Any, images: ImageReader = TEXT_ONLY) -> tuple[Message, ...]:
    """Return checked messages; `developer` messages become `system` messages, null content becomes empty."""
    if not isinstance(given, list) or not given:
        raise ApiError("messages must be a list with at least one message")
    return tuple(_message(message, number, images) for number, message in enumerate(given))


def content_of(content: Any, where: str) -> str:
    """Return the text of a message's content: a text, parts of text, or null."""
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for number, part in enumerate(content if isinstance(content, list) else [content]):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in IMAGE_PARTS:
            raise ApiError(f"{where}.content[{number}] is an image; only user, system and tool messages have images")
        if kind not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ApiError(f"{where}.content has {part!r:.80}; it must be a text, or parts of type text")
        texts.append(part["text"])
    return "".join(texts)


def parts_of(content: Any, role: str, where: str, images: ImageReader) -> Content:
    """Return the content of a message: its text, or parts if it has images; the assistant's has none."""
    if role == "assistant" or not any(map(_is_image, content if isinstance(content, list) else ())):
        return content_of(content, where)
    found: list[ContentPart] = []
    for number, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind == "image" and isinstance(part.get("image"), Picture):  # read before
            found.append(part)
        elif kind in IMAGE_PARTS:
            found.append(images.read(part, f"{where}.content[{number}]"))
        else:
            found.append(TextPart(type="text", text=content_of([part], where)))
    return found


def tools_of(given: Any, choice: Any, function_of: Callable[[Mapping[str, Any]], Any]) -> tuple[ToolSpec, ...]:
    """Return the tools of a request; none if `tool_choice` is none. `function_of(tool)` has its name and parameters."""
    if choice not in (None, "auto", "none"):
        raise ApiError(f"tool_choice={choice!r:.80}: the model is not forced to call tools; give auto or none")
    if given is None or choice == "none":
        return ()
    if not isinstance(given, list):
        raise ApiError("tools must be a list")
    found: list[ToolSpec] = []
    for tool in given:
        function = function_of(tool) if isinstance(tool, Mapping) and tool.get("type") == "function" else None
        name = function.get("name") if isinstance(function, Mapping) else None
        if not (isinstance(function, Mapping) and isinstance(name, str) and name):
            raise ApiError(f"the tool {tool!r:.200} is not served; a tool has the type function, and a name")
        schema, description = (
            function.get("parameters") or {"type": "object", "properties": {}},
            function.get("description"),
        )
        if not isinstance(schema, Mapping) or not isinstance(description or "", str):
            raise ApiError(
                f"the tool {name!r:.80} has parameters that are not a JSON schema, or a description that is not text"
            )
        found.append(
            {"type": "function", "function": {"name": name, "description": description or "", "parameters": schema}}
        )
    if len({tool["function"]["name"] for tool in found}) < len(found):
        raise ApiError("tools must have different names")
    return tuple(found)


def call_of(call_id: Any, name: Any, arguments: Any, where: str) -> ToolCall:
    """Return a checked tool call."""
    if not (isinstance(call_id, str) and isinstance(name, str) and isinstance(arguments, str)):
        raise ApiError(f"{where} has a tool call whose id, name or arguments are not text")
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def require_text_format(given: Any, key: str) -> None:
    """Raise `ApiError` for an output format other than text."""
    if given is not None and not (isinstance(given, Mapping) and given.get("type", "text") == "text"):
        raise ApiError(f"{key}={given!r:.80}: output is not constrained; it must be text or left out")


def require_plain_sampling(body: Mapping[str, Any]) -> None:
    """Raise `ApiError` for penalties and biases of tokens."""
    for key in ("frequency_penalty", "presence_penalty"):
        if number(body, key, -2, 2) not in (None, 0.0):
            raise ApiError(f"{key}={body[key]!r} changes the sampling; it must be 0 or left out")
    if body.get("logit_bias"):
        raise ApiError("logit_bias changes the sampling; leave it out")


def reject_unknown(body: Mapping[str, Any], known: Collection[str]) -> None:
    """Raise `ApiError` for keys that are not `known`, unless they are null."""
    if unknown := sorted(key for key in body if key not in known and body[key] is not None):
        raise ApiError(f"{', '.join(unknown)[:200]}: not served; leave it out")


def integer(body: Mapping[str, Any], key: str, least: int, most: int) -> int | None:
    """Return an integer of the body; `ApiError` for anything else, and beyond its bounds."""
    value = body.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
        raise ApiError(f"{key}={value!r:.80} must be an integer from {least} to {most}")
    return value


def number(body: Mapping[str, Any], key: str, least: float, most: float) -> float | None:
    """Return a number of the body; `ApiError` for anything else, and beyond its bounds."""
    value = body.get(key)
    if value is None:
        return None
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise ApiError(f"{key}={value!r:.80} must be a number from {least:g} to {most:g}")
    return float(value) if math.isfinite(value) else None


def _message(message: Any, number: int, images: ImageReader) -> Message:
    where = f"messages[{number}]"
    role = _ROLES.get(str(message.get("role"))) if isinstance(message, Mapping) else None
    if role is None:
        raise ApiError(f"{where} must be an object whose role is one of {', '.join(_ROLES)}")
    found: Message = {"role": role, "content": parts_of(message.get("content"), role, where, images)}
    if role == "assistant":
        if calls := message.get("tool_calls"):
            found["tool_calls"] = [_call(call, where) for call in _list(calls, f"{where}.tool_calls")]
        if isinstance(reasoning := message.get("reasoning_content"), str):
            found["reasoning_content"] = reasoning
    if role == "tool":
        if not isinstance(message.get("tool_call_id"), str):
            raise ApiError(f"{where} answers a tool call, so it needs a tool_call_id")
        found["tool_call_id"] = message["tool_call_id"]
    return found


def _call(call: Any, where: str) -> ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise ApiError(f"{where} has the tool call {call!r:.80}; it must have an id and a function")
    return call_of(call.get("id"), function.get("name"), function.get("arguments"), where)


def _is_image(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") in (*IMAGE_PARTS, "image")


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list):
        raise ApiError(f"{where} must be a list")
    return value


def stops_of(given: Any) -> tuple[str, ...]:
    """Return the texts that end a turn. `ApiError` for anything but a text, or a few of them."""
    stops = [given] if isinstance(given, str) else given or []
    if not isinstance(stops, list) or len(stops) > _MOST_STOPS or not all(isinstance(s, str) and s for s in stops):
        raise ApiError(f"stop must be a text, or a list of at most {_MOST_STOPS} texts")
    return tuple(stops)


def _prompts(given: Any) -> Sequence[str | list[int]]:
    """Return the prompts of a request: a text, texts, token ids, or lists of token ids."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given and all(isinstance(one, str) for one in given):
        return given
    if isinstance(given, list) and given and all(isinstance(one, list) for one in given):
        return [token_ids_of(one) for one in given]
    return [token_ids_of(given)]


def token_ids_of(given: Any) -> list[int]:
    """Return a prompt of token ids. `ApiError` for anything else."""
    if not isinstance(given, list) or not given or not all(type(token) is int and 0 <= token < _END for token in given):
        raise ApiError(
            f"prompt must be a list of token ids, integers from 0 to {_END - 1}, or without prompt_logprobs a text; or "
            "a list of either"
        )
    return given
