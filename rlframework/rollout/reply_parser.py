"""Parse completions: tool calls and reasoning in the formats of known chat templates.

A tool call that is malformed stays a call, with the text as its arguments: the environment answers it with an error
that the model can read. Text is never repaired.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlframework.interfaces.messages import ToolSpec
from rlframework.rollout.tool_calls import ParsedCall, ParsedTurn, call_of, call_of_json

Parser = Callable[[str, Sequence[ToolSpec]], ParsedTurn]
"""Parses the text of a completion, special tokens included, without the token that ended the turn, given the tools."""

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^>\n]*)>(.*?)(?:</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL)
_CHANNEL = re.compile(
    r"(?:<\|start\|>assistant)?(?P<before>[^<]*)<\|channel\|>(?P<header>[^<]*)(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<text>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)
_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"')
_RECIPIENT = re.compile(r"to=functions\.(\S+)")


def parser_for(template: str | None) -> Parser:
    """Return the parser for models with the chat template `template`; unknown ones write Hermes tool calls."""
    text = template or ""
    for mark, parser in _MARKS:
        if mark in text:
            return parser
    return parse_hermes


def parse_hermes(text: str, _tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    """Parse `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` blocks: Qwen, Hermes, SmolLM2."""
    reasoning, rest = split_reasoning(text)
    calls = tuple(call_of_json(found) for found in _HERMES.findall(rest))
    return ParsedTurn(_HERMES.sub("", rest).strip() if calls else rest, reasoning, calls)


def parse_qwen_coder(text: str, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    """Parse `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>` blocks: Qwen3-Coder.

    A value is text where the schema of the tool in `tools` has a string, elsewhere JSON. What is not JSON stays text,
    and so do values of unknown parameters and tools.
    """
    reasoning, rest = split_reasoning(text)
    calls = tuple(_coder_call(found, tools) for found in _HERMES.findall(rest))
    return ParsedTurn(_HERMES.sub("", rest).strip() if calls else rest, reasoning, calls)


def _coder_call(text: str, tools: Sequence[ToolSpec]) -> ParsedCall:
    found = _FUNCTION.search(text)
    if found is None:
        return call_of_json(text)
    name, values = found[1].strip(), _PARAMETER.findall(found[2])
    if not values and found[2].strip():  # parameters in another form: the environment says that they are wrong
        return ParsedCall(name, found[2].strip())
    schemas = next((tool["function"]["parameters"] for tool in tools if tool["function"]["name"] == name), {})
    known = schemas.get("properties", {})
    arguments = {key.strip(): _value(value, known.get(key.strip())) for key, value in values}
    return ParsedCall(name, json.dumps(arguments, ensure_ascii=False))


def _value(text: str, schema: Mapping[str, Any] | None) -> object:
    if schema is None or _allows_text(schema):
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _allows_text(schema: Mapping[str, Any]) -> bool:
    """Whether the JSON schema of a value has the type string, alone or first of several."""
    kind = schema.get("type")
    first = kind[0] if isinstance(kind, list) and kind else kind
    options = schema.get("anyOf") or schema.get("oneOf") or ()
    return first == "string" or any(_allows_text(option) for option in options[:1])


def parse_llama(text: str, _tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    """Parse a turn that is one JSON object with `name` and `parameters`, perhaps after `<|python_tag|>`: Llama 3.

    After the tag there may be several, with `;` between them. An object without parameters and tag is an answer.
    """
    content, marked, call = text.partition("<|python_tag|>")
    if marked:
        return ParsedTurn(content.strip(), None, tuple(map(call_of_json, _separated(call))))
    stripped = text.strip()
    if stripped.startswith("{") and '"name"' in stripped and _ARGUMENTS.search(stripped):
        return ParsedTurn("", None, (call_of_json(stripped),))
    return ParsedTurn(text)


def _separated(text: str) -> list[str]:
    """The JSON values in `text`, which `;` separates; from the first that is malformed, the rest is one."""
    found, decoder, rest = [], json.JSONDecoder(), text.strip()
    while rest:
        try:
            _, end = decoder.raw_decode(rest)
        except (ValueError, RecursionError):
            end = len(rest)
        if rest[end:].lstrip()[:1] not in ("", ";"):
            end = len(rest)
        found.append(rest[:end])
        rest = rest[end:].lstrip().removeprefix(";").lstrip()
    return found or [text]


def parse_mistral(text: str, _tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    """Parse `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]NAME[ARGS]{...}`: Mistral."""
    reasoning, rest = split_reasoning(text, "[THINK]", "[/THINK]")
    content, *blocks = rest.split("[TOOL_CALLS]")
    calls = tuple(call for block in blocks for call in _mistral_calls(block))
    return ParsedTurn(content.strip() if blocks else content, reasoning, calls)


def _mistral_calls(block: str) -> list[ParsedCall]:
    name, marked, arguments = block.partition("[ARGS]")
    if marked:
        return [ParsedCall(name.strip(), arguments.strip())]
    try:
        found = json.loads(block)
    except (ValueError, RecursionError):
        return [ParsedCall("", block.strip())]
    items = found if isinstance(found, list) and found else [found]
    return [call_of(item, json.dumps(item)) for item in items]


def parse_deepseek(text: str, _tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    """Parse DeepSeek's calls: `function<｜tool▁sep｜>NAME` and a block of JSON, or `NAME<｜tool▁sep｜>{...}`."""
    reasoning, rest = split_reasoning(text)
    content, marked, block = rest.partition("<｜tool▁calls▁begin｜>")
    return ParsedTurn(content.strip() if marked else content, reasoning, tuple(map(_deepseek_call, _calls_in(block))))


def _calls_in(block: str) -> list[str]:
    return _DEEPSEEK.findall(block) or ([block] if block else [])


def _deepseek_call(text: str) -> ParsedCall:
    before, marked, after = text.partition("<｜tool▁sep｜>")
    if not marked:
        return ParsedCall("", text.strip())
    if before.strip() != "function":
        return ParsedCall(before.strip(), after.strip())
    name, _, arguments = after.partition("\n")
    arguments = arguments.strip().removeprefix("```json").removesuffix("```")
    return ParsedCall(name.strip(), arguments.strip())


def parse_harmony(text: str, _tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    """Parse the channels of gpt-oss: analysis is reasoning, a message to `functions.NAME` a call, the rest content."""
    reasoning, content, calls, end = [], [], [], 0
    for found in _CHANNEL.finditer(text):
        end = found.end()
        recipient = _RECIPIENT.search(found["before"]) or _RECIPIENT.search(found["header"])
        if recipient:
            calls.append(ParsedCall(recipient[1], found["text"].strip()))
        elif found["header"].strip().startswith("analysis"):
            reasoning.append(found["text"])
        else:
            content.append(found["text"])
    content.append(text[end:])
    return ParsedTurn("".join(content), "\n".join(reasoning) if reasoning else None, tuple(calls))


def split_reasoning(text: str, start: str = "<think>", end: str = "</think>") -> tuple[str | None, str]:
    """Split `text` into the reasoning between `start` and `end`, or None, and the rest.

    The template's prompt may contain `start` already. Reasoning that never ends is all of the text.
    """
    before, closed, rest = text.partition(end)
    if closed:
        return before.strip().removeprefix(start).strip("\n"), rest.lstrip("\n")
    if text.lstrip().startswith(start):
        return text.lstrip().removeprefix(start).strip("\n"), ""
    return None, text


_MARKS: tuple[tuple[str, Parser], ...] = (
    ("<|channel|>", parse_harmony),
    ("<｜Assistant｜>", parse_deepseek),
    ("[TOOL_CALLS]", parse_mistral),
    ("<function=", parse_qwen_coder),
    ("<tool_call>", parse_hermes),
    ("<|start_header_id|>", parse_llama),
)
"""The parsers, by what the chat template contains; the first that fits."""
