"""Choose how the completions of a model are read: its tool calls have the form that its chat template writes.

A prompt shows the model the calls of earlier turns, so it writes further ones in the same form. That form is found by
rendering a known call: the first parser that recovers it is used. If none does, tools are rejected.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import DataError
from rlframework.datasets.chat.chat_template import (
    ASKED,
    PROBE,
    apply_template,
    knows_tools,
    template_text,
    without_template_warnings,
)
from rlframework.datasets.chat.chat_text import ChatText, common_prefix
from rlframework.datasets.chat.reply_parser import PARSERS, Parser, parse_hermes, parser_for, splitter_for
from rlframework.datasets.chat.tool_calls import ParsedCall, ParsedTurn, call_of
from rlframework.interfaces.messages import Message, ToolSpec

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_OPENED = re.compile(r"[<\[][^<>\[\]\s]*$")
"""Matches a mark at the end of a text that is not closed."""

_NAME = f"f{PROBE}"
_ARGUMENTS = {"count": int(PROBE), "word": f"w{PROBE}"}
_TOOL: ToolSpec = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "",
        "parameters": {"type": "object", "properties": {"count": {"type": "integer"}, "word": {"type": "string"}}},
    },
}
_CALLING: Message = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"id": "probe0000", "type": "function", "function": {"name": _NAME, "arguments": json.dumps(_ARGUMENTS)}}
    ],
}


class CompletionReader:
    """Reads the completions of models with one chat template.

    `split` parses turns without tools, `calls` those with tools; it is None if they cannot be parsed, for the reason
    `problem`.
    """

    def __init__(self, split: Parser, calls: Parser | None, problem: str = "") -> None:
        self._split, self._calls, self._problem = split, calls, problem

    def require_calls(self) -> None:
        """Raise a `DataError` if the tool calls of the chat template cannot be parsed."""
        if self._calls is None:
            raise DataError(self._problem)

    def parse(self, text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        """Return the reasoning, content and calls in a completion's text; without `tools`, calls are content."""
        return self._calls(text, tools) if tools and self._calls is not None else self._split(text, tools)


def reader_of(tokenizer: PreTrainedTokenizerBase) -> CompletionReader:
    """Return what reads the completions of models with `tokenizer`."""
    return _reader(tokenizer, template_text(tokenizer))


@lru_cache(maxsize=16)
def _reader(tokenizer: PreTrainedTokenizerBase, template: str | None) -> CompletionReader:
    split = splitter_for(template)
    if template is None or not knows_tools(tokenizer):  # tools are described as text, with Hermes' calls
        return CompletionReader(split, parse_hermes)
    try:
        with without_template_warnings():
            written = _written_call(tokenizer)
    except DataError as error:
        return CompletionReader(split, None, _problem(tokenizer, f"it rejects a tool call ({error})"))
    native = getattr(tokenizer, "response_template", None) and parse_response(tokenizer)
    for parser in filter(None, (native, parser_for(template), *PARSERS)):
        if _recovers(parser, written):
            return CompletionReader(split, parser)
    what = f"it writes a call as {written.strip()!r:.300}, in a form that is not parsed"
    if PROBE not in written:
        what = "it does not write the calls of earlier turns"
    return CompletionReader(split, None, _problem(tokenizer, what))


def parse_response(tokenizer: PreTrainedTokenizerBase) -> Parser:
    """Return a parser that uses the response template of `tokenizer`, which some publish with their chat template."""

    def parse(text: str, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
        try:
            given: Any = list(tools)
            found: Mapping[str, Any] = tokenizer.parse_response(text, prefix="", tools=given)
            calls = tuple(call_of(call.get("function", call), text) for call in found.get("tool_calls") or ())
            reasoning = found.get("reasoning_content") or found.get("thinking")
            return ParsedTurn(found.get("content") or "", reasoning, calls)
        except Exception:  # noqa: BLE001 - a parser that others have written; the environment refuses this call
            return ParsedTurn("", None, (ParsedCall("", text.strip()),))

    return parse


def _written_call(tokenizer: PreTrainedTokenizerBase) -> str:
    """The text of an assistant turn with one call, without what a prompt has already and without its end."""
    prompt = apply_template(tokenizer, [ASKED], [_TOOL], prompt=True)
    whole = apply_template(tokenizer, [ASKED, _CALLING], [_TOOL])
    common = _OPENED.sub("", common_prefix(prompt, whole))  # `<think>` and `<tool_call>` begin with the same letters
    text = whole[len(common) :]
    for end in ChatText(tokenizer).turn_ends:
        text = text.rpartition(end)[0] or text
    return text


def _recovers(parser: Parser, text: str) -> bool:
    calls = parser(text, [_TOOL]).calls
    try:
        return [(call.name, json.loads(call.arguments)) for call in calls] == [(_NAME, _ARGUMENTS)]
    except ValueError:
        return False


def _problem(tokenizer: PreTrainedTokenizerBase, what: str) -> str:
    return (
        f"tools cannot be used with the chat template of {tokenizer.name_or_path or 'the tokenizer'}: {what}. Set "
        "policy.chat_template to one that writes calls as Hermes, Qwen3-Coder, GLM-4.5, LFM2.5, Llama 3, Mistral, "
        "DeepSeek or gpt-oss do, or to one without tools, for which they are described as text"
    )
