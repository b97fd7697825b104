"""Parse completions: tool calls and reasoning in the formats of known chat templates.

A tool call that is malformed stays a call, with the text as its arguments: the environment answers it with an error
that the model can read. Text is never repaired. Each parser takes time in proportion to the text: a model may repeat
one token until it is stopped.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlframework.datasets.chat.tool_calls import ParsedCall, ParsedTurn, call_of, call_of_json, python_calls
from rlframework.interfaces.messages import ToolSpec

Parser = Callable[[str, Sequence[ToolSpec]], ParsedTurn]
"""Parses the text of a completion, special tokens included, without the token that ended the turn, given the tools."""

_HERMES = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_FUNCTION = re.compile(r"<function=([^<>\n]*)>(.*?)(</function>|\Z)", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^<>\n]*)>\n?(.*?)\n?(?:</parameter>|(?=<parameter=)|\Z)", re.DOTALL)
_GLM = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)
_DEEPSEEK = re.compile(r"<｜tool▁call▁begin｜>(.*?)(?:<｜tool▁call▁end｜>|\Z)", re.DOTALL)
_CHANNEL = re.compile(
    r"(?:<\|start\|>assistant|\A|(?<=[<>]))(?P<before>[^<>]*)<\|channel\|>(?P<header>[^<]*)(?:<\|constrain\|>[^<]*)?"
    r"<\|message\|>(?P<text>.*?)(?:<\|end\|>|<\|call\|>|<\|return\|>|\Z)",
    re.DOTALL,
)
_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"')
_NAMED = re.compile(r'\{\s*"name"\s*:\s*"([^"\n]*)"\s*,\s*"(?:parameters|arguments)"')
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
    return _with_blocks(text, _HERMES, call_of_json)


def _with_blocks(text: str, block: re.Pattern[str], call: Callable[..., ParsedCall]) -> ParsedTurn:
    """A turn whose calls are in `block`s: `call` gets the groups of each, and the rest is content."""
    reasoning, rest = split_reasoning(text)
    calls = tuple(call(*found.groups()) for found in block.finditer(rest))
    return ParsedTurn(block.sub("", rest).strip() if calls else rest, reasoning, calls)


def parse_qwen_coder(text: str, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    """Parse `<tool_call><function=NAME><parameter=KEY>value</parameter></function></tool_call>` blocks: Qwen3-Coder.

    A value is text where the schema of the tool in `tools` has a string, elsewhere JSON. What is not JSON stays text,
    and so do values of unknown parameters and tools. A function that is cut off is malformed: its last value may be.
    """
    return _with_blocks(text, _HERMES, partial(_coder_call, tools))


def _coder_call(tools: Sequence[ToolSpec], text: str) -> ParsedCall:
    found = _FUNCTION.search(text)
    if found is None:
        return call_of_json(text)
    name, values = found[1].strip(), _PARAMETER.findall(found[2])
    # cut off, or parameters in another form: the environment says that they are wrong
    if not found[3] or (not values and found[2].strip()):
        return ParsedCall(name, found[2].strip() or found[0].strip())
    return _typed_call(name, values, tools)


def parse_glm(text: str, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    """Parse `<tool_call>NAME<arg_key>KEY</arg_key><arg_value>value</arg_value></tool_call>` blocks: GLM-4.5 and later.

    Values have types as in `parse_qwen_coder`. A call that is cut off is malformed.
    """
    return _with_blocks(text, _GLM, partial(_glm_call, tools))


def _glm_call(tools: Sequence[ToolSpec], text: str, closed: str) -> ParsedCall:
    name, marked, values = text.partition("<arg_key>")
    arguments = _glm_arguments(marked + values)
    if not closed or arguments is None:
        return ParsedCall(name.strip() if marked else "", (marked + values if marked else text).strip())
    if not marked and (not name.strip() or "{" in name):  # no name, or another format
        return call_of_json(text)
    return _typed_call(name.strip(), arguments, tools)


def _glm_arguments(text: str) -> list[tuple[str, str]] | None:
    """The keys and values in `text`, or None if it has anything else."""
    *written, rest = text.split("</arg_value>")
    pairs = []
    for each in written:
        key, _, value = each.lstrip().partition("</arg_key>")
        value = value.lstrip()
        if not key.startswith("<arg_key>") or not value.startswith("<arg_value>"):
            return None
        pairs.append((key.removeprefix("<arg_key>"), value.removeprefix("<arg_value>")))
    return None if rest.strip() else pairs


def parse_lfm(text: str, _tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    """Parse `<|tool_call_start|>[NAME(KEY=value)]<|tool_call_end|>`, with values as in Python: LFM2."""
    reasoning, rest = split_reasoning(text)
    content, calls = python_calls(rest)
    return ParsedTurn(content, reasoning, calls)


def _typed_call(name: str, values: Sequence[tuple[str, str]], tools: Sequence[ToolSpec]) -> ParsedCall:
    """The call of `name` with `values` by their keys, in the types that its tool in `tools` has."""
    schemas = (tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name)
    known = (next(schemas, None) or {}).get("properties") or {}
    arguments = {key.strip(): _value(value, known.get(key.strip())) for key, value in values}
    try:
        return ParsedCall(name, json.dumps(arguments, ensure_ascii=False))
    except RecursionError:  # read, but too deep to be written
        return ParsedCall(name, repr(values))


def _value(text: str, schema: Any) -> object:
    if not isinstance(schema, Mapping) or _allows_text(schema):
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


def parse_llama(text: str, tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    """Parse a turn that is one JSON object with `name` and `parameters`, perhaps after `<|python_tag|>`: Llama 3.

    After the tag there may be several, with `;` between them. Without it, text may come before an object that names
    one of `tools` and ends the turn. An object without parameters and tag is an answer.
    """
    content, marked, call = text.partition("<|python_tag|>")
    if marked:
        return ParsedTurn(content.strip(), None, tuple(map(call_of_json, _separated(call))))
    stripped = text.strip()
    if stripped.startswith("{") and '"name"' in stripped and _ARGUMENTS.search(stripped):
        return ParsedTurn("", None, (call_of_json(stripped),))
    names = {tool["function"]["name"] for tool in tools}
    begin = next((found.start() for found in _NAMED.finditer(text) if found[1] in names), None)
    if begin is None or not _ends_with_json(text[begin:]):
        return ParsedTurn(text)
    return ParsedTurn(text[:begin].strip(), None, tuple(map(call_of_json, _separated(text[begin:]))))


def _ends_with_json(text: str) -> bool:
    """Whether nothing follows the JSON objects at the start of `text`, the last of which may be malformed."""
    last = _separated(text)[-1]
    try:
        _, end = json.JSONDecoder().raw_decode(last)
    except (ValueError, RecursionError):
        return True
    return end == len(last)


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
    try:
        return [call_of(item, json.dumps(item)) for item in items]
    except RecursionError:  # read, but too deep to be written
        return [ParsedCall("", block.strip())]


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


def split_thinking(
    text: str, _tools: Sequence[ToolSpec] = (), *, start: str = "<think>", end: str = "</think>"
) -> ParsedTurn:
    """Parse a turn without tools: its reasoning and its content, in which calls are text."""
    reasoning, rest = split_reasoning(text, start, end)
    return ParsedTurn(rest, reasoning)


split_mistral = partial(split_thinking, start="[THINK]", end="[/THINK]")


def split_harmony(text: str, _tools: Sequence[ToolSpec] = ()) -> ParsedTurn:
    """As `split_thinking`, for gpt-oss: messages to a recipient are content as they were written."""
    turn, end = parse_harmony(text), 0
    if not turn.calls:
        return turn
    content = []
    for found in _CHANNEL.finditer(text):
        end = found.end()
        if not found["header"].strip().startswith("analysis") or _RECIPIENT.search(found["before"]):
            content.append(found[0].removeprefix("<|start|>assistant"))
    return ParsedTurn("".join([*content, text[end:]]), turn.reasoning)


_MARKS: tuple[tuple[str, Parser], ...] = (
    ("<|channel|>", parse_harmony),
    ("<｜Assistant｜>", parse_deepseek),
    ("[TOOL_CALLS]", parse_mistral),
    ("<function=", parse_qwen_coder),
    ("<arg_key>", parse_glm),
    ("<|tool_call_start|>", parse_lfm),
    ("<tool_call>", parse_hermes),
    ("<|start_header_id|>", parse_llama),
)
"""The parsers, by what the chat template contains; the first that fits."""

PARSERS = tuple(dict.fromkeys((parse_hermes, *(parser for _, parser in _MARKS))))
"""The parsers of all formats."""

_SPLITTERS: Mapping[Parser, Parser] = {parse_mistral: split_mistral, parse_harmony: split_harmony}


def splitter_for(template: str | None) -> Parser:
    """Return the parser for turns without tools of models with the chat template `template`."""
    return _SPLITTERS.get(parser_for(template), split_thinking)
