"""Completions in the formats of known models, written by hand, as content, reasoning and tool calls."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlframework.datasets.chat.reply_parser import (
    PARSERS,
    Parser,
    parse_deepseek,
    parse_glm,
    parse_harmony,
    parse_hermes,
    parse_lfm,
    parse_llama,
    parse_mistral,
    parse_qwen_coder,
    parser_for,
)
from rlframework.datasets.chat.tool_calls import ParsedCall, ParsedTurn

ADD = ParsedCall("add", '{"a": 1}')
NOW = ParsedCall("now", "{}")
ADD_JSON = '{"name": "add", "arguments": {"a": 1}}'
ADD_LLAMA = '{"name": "add", "parameters": {"a": 1}}'
SEARCHED = ParsedCall("search", '{"limit": 1, "text": "a"}')
TYPES = {"text": "string", "code": ["string", "null"], "limit": "integer", "deep": "boolean", "tags": "array"}
PROPERTIES: Any = {name: {"type": kind} for name, kind in TYPES.items()}
PROPERTIES["note"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
SEARCH: Any = {"type": "function", "function": {"name": "search", "description": "", "parameters": PARAMETERS}}
TOOLS: Any = [SEARCH, {"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALLED, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


def says(content: str, reasoning: str | None = None) -> ParsedTurn:
    return ParsedTurn(content, reasoning)


def calls(*made: ParsedCall, content: str = "", reasoning: str | None = None) -> ParsedTurn:
    return ParsedTurn(content, reasoning, made)


def malformed(arguments: str, name: str = "", content: str = "") -> ParsedTurn:
    """A turn whose call cannot be read: its text is there to see."""
    return ParsedTurn(content, None, (ParsedCall(name, arguments),))


def tagged(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


HERMES = [
    (tagged(f"\n{ADD_JSON}\n"), calls(ADD)),
    (f"Two:\n{tagged(ADD_JSON)}\n" + tagged('{"name": "now"}'), calls(ADD, NOW, content="Two:")),
    # arguments that are JSON text stay as they are, also where they are none
    (tagged('{"name": "add", "arguments": "{\\"a\\": 1}"}'), calls(ADD)),
    (tagged('{"name": "add", "arguments": "x"}'), malformed("x", "add")),
    (tagged('{"name": "add", '), malformed('{"name": "add",')),
    ('<tool_call>\n{"name": "add"', malformed('{"name": "add"')),  # cut off
    (tagged("[1]"), malformed("[1]")),
    (tagged('{"name": 5}'), malformed('{"name": 5}')),
    (tagged('{"name": ""}'), malformed('{"name": ""}')),
    (tagged(""), malformed("")),
    ("<tool_call>" + "[" * 100_000, malformed("[" * 100_000)),
    (" no call\n", says(" no call\n")),
    ("</tool_call>", says("</tool_call>")),
    ("", says("")),
    # reasoning is no place for calls
    (f"<think>\n{tagged(ADD_JSON)}\n</think>\n\nNo.", says("No.", tagged(ADD_JSON))),
    ("<think>\nendless", says("", "endless")),
    ("opened by the prompt\n</think>\n\n3", says("3", "opened by the prompt")),
]
QWEN_CODER = [
    (
        "Both:\n<tool_call>\n<function=search>\n<parameter=limit>\n1\n</parameter>\n<parameter=text>\na\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
        calls(SEARCHED, NOW, content="Both:"),
    ),
    # parameters that are not closed, and a call that is cut off
    (tagged("<function=search><parameter=limit>1<parameter=text>a</function>"), calls(SEARCHED)),
    ("<tool_call>\n<function=search>\n<parameter=text>\nab", malformed("<parameter=text>\nab", "search")),
    (tagged("<function=search>{a</function>"), malformed("{a", "search")),
    (tagged(ADD_JSON), calls(ADD)),
    (tagged("search(1)"), malformed("search(1)")),
    ("no call", says("no call")),
    ("<think>\nwhy\n</think>\n\nno", says("no", "why")),
]
LLAMA = [
    (ADD_LLAMA, calls(ADD)),
    (f"\n{ADD_JSON}\n", calls(ADD)),
    (f"Hm.<|python_tag|>{ADD_LLAMA}", calls(ADD, content="Hm.")),
    (f'<|python_tag|>{ADD_LLAMA}; {{"name": "now", "parameters": {{}}}}', calls(ADD, NOW)),
    (
        '<|python_tag|>{"name": "add", "parameters": {"a": "b; c"}}; {"name": "now"}',
        calls(ParsedCall("add", '{"a": "b; c"}'), NOW),
    ),
    ("<|python_tag|>add.call(a=1; b)", malformed("add.call(a=1; b)")),
    ('<|python_tag|>{"name": "now"}; {"name": ', calls(NOW, ParsedCall("", '{"name":'))),
    ('<|python_tag|>{"name": "now"} and', malformed('{"name": "now"} and')),
    ("<|python_tag|>", malformed("")),
    (ADD_LLAMA[:-1], malformed(ADD_LLAMA[:-1])),
    # text before an object that names a tool and ends the turn
    (f"I add.\n\n{ADD_LLAMA}", calls(ADD, content="I add.")),
    (f'Hm {{1}}: {ADD_LLAMA}; {{"name": "now"}}', calls(ADD, NOW, content="Hm {1}:")),
    (f"I add. {ADD_LLAMA[:-5]}", malformed(ADD_LLAMA[:-5], content="I add.")),
    # answers
    (f"Use {ADD_LLAMA} for it.", says(f"Use {ADD_LLAMA} for it.")),
    ('It is {"name": "other", "parameters": {}}', says('It is {"name": "other", "parameters": {}}')),
    ('{"name": "Ann", "age": 3}', says('{"name": "Ann", "age": 3}')),
    (" 3 ", says(" 3 ")),
]
GLM = [
    (  # GLM-4.5, with several values of their types
        "\n<think>why</think>\nBoth:\n<tool_call>search\n<arg_key>limit</arg_key>\n<arg_value>1</arg_value>\n"
        "<arg_key>text</arg_key>\n<arg_value>a</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>",
        calls(SEARCHED, NOW, content="Both:", reasoning="why"),
    ),
    (  # GLM-5, without line breaks
        '</think><tool_call>search<arg_key>tags</arg_key><arg_value>["a"]</arg_value></tool_call>',
        calls(ParsedCall("search", '{"tags": ["a"]}'), reasoning=""),
    ),
    # cut off, where a value may be incomplete, and malformed
    (
        "<tool_call>search\n<arg_key>a</arg_key>\n<arg_value>1",
        malformed("<arg_key>a</arg_key>\n<arg_value>1", "search"),
    ),
    ("<tool_call>sea", malformed("sea")),
    (tagged("search<arg_key>limit</arg_key>"), malformed("<arg_key>limit</arg_key>", "search")),
    (tagged(""), malformed("")),
    (tagged(ADD_JSON), calls(ADD)),
    ("no call", says("no call")),
]
LFM_QUOTED = ParsedCall("f", r"""{"a": "it's \\d", "b": ["x", -1.5, null], "c": {"k": true, "n": null}}""")
LFM = [
    ("[add(a=1), now()]", (ADD, NOW)),
    ("add(a=1)", (ADD,)),
    (r"""[f(a='it\'s \d', b=["x", -1.5, None], c={"k": true, "n": null})]""", (LFM_QUOTED,)),
    ("[add(\n  a=1),\n now()]", (ADD, NOW)),
    ("[say(text='two\nlines')]", (ParsedCall("say", '{"text": "two\\nlines"}'),)),
    ("[web.search(q='é')]", (ParsedCall("web.search", '{"q": "é"}'),)),
    # malformed: nothing is evaluated
    *((text, (ParsedCall("", text),)) for text in (
        "[add(1)]", "[add(a=1]", "[add(a=open('x'))]", "[add(a=1, a=2)]", "[add(**{})]", "[]", "", "a b", "[1]",
        "[add(a=x)]", "[add(a={1, 2})]", "[add(a=" + "(" * 9000, "[add(a=" + "-" * 9000 + "1)]", "[add(a='\x00')]",
    )),
]  # fmt: skip
MISTRAL = [
    (f'[TOOL_CALLS][{ADD_JSON}, {{"name": "now"}}]', calls(ADD, NOW)),
    (f"So: [TOOL_CALLS] {ADD_JSON}", calls(ADD, content="So:")),
    ('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', calls(ADD, NOW)),
    ("[TOOL_CALLS]add[ARGS]{a", malformed("{a", "add")),
    ('[TOOL_CALLS] [{"name": "add", ', malformed('[{"name": "add",')),
    ("[TOOL_CALLS][]", malformed("[]")),
    ("[TOOL_CALLS][1]", malformed("1")),
    ("[THINK]why[/THINK]3", says("3", "why")),
    (" 3", says(" 3")),
]
DEEPSEEK = [
    (  # V3 and R1
        f'Yes.{BEGIN}{CALL}function{SEP}add\n```json\n{{"a": 1}}\n```{CALLED}\n'
        f"{CALL}function{SEP}now\n```json\n{{}}\n```{CALLED}{END}",
        calls(ADD, NOW, content="Yes."),
    ),
    (f'{BEGIN}{CALL}add{SEP}{{"a": 1}}{CALLED}{CALL}now{SEP}{{}}{CALLED}{END}', calls(ADD, NOW)),  # V3.1
    (f"{BEGIN}{CALL}add{{}}{CALLED}{END}", malformed("add{}")),
    (f"{BEGIN}add", malformed("add")),
    (f'{BEGIN}{CALL}function{SEP}add\n```json\n{{"a"', malformed('{"a"', "add")),
    (f"{BEGIN}{CALL}function{SEP}add", malformed("", "add")),
    ("why\n</think>\n\n3", says("3", "why")),
    ("3", says("3")),
]
THOUGHT = "<|channel|>analysis<|message|>why<|end|><|start|>assistant"
HARMONY = [
    ("<|channel|>final<|message|>3", says("3")),
    (f"{THOUGHT}<|channel|>final<|message|>3", says("3", "why")),
    # the recipient before the channel, and after it
    (f'{THOUGHT} to=functions.add<|channel|>commentary json<|message|>{{"a": 1}}', calls(ADD, reasoning="why")),
    ('<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>', calls(ADD)),
    (  # a preamble for the user, then a malformed call
        "<|channel|>commentary<|message|>Let me.<|end|><|start|>assistant<|channel|>commentary to=functions.add"
        "<|message|>{a",
        malformed("{a", "add", content="Let me."),
    ),
    ("<|channel|>analysis<|message|>endless", says("", "endless")),
    (f"{THOUGHT}<|channel|>analysis<|message|>b<|end|>", says("", "why\nb")),
    ("no channel", says("no channel")),
]
FORMATS: dict[Parser, Any] = {
    parse_hermes: HERMES, parse_qwen_coder: QWEN_CODER, parse_llama: LLAMA, parse_glm: GLM, parse_mistral: MISTRAL,
    parse_deepseek: DEEPSEEK, parse_harmony: HARMONY,
}  # fmt: skip
CASES = [(parse, *case) for parse, cases in FORMATS.items() for case in cases]
NAMES = [f"{case[0].__name__} {case[1]:.40}" for case in CASES]


@pytest.mark.parametrize(("parse", "text", "expected"), CASES, ids=NAMES)
def test_a_turn_is_content_reasoning_and_calls(parse: Parser, text: str, expected: ParsedTurn) -> None:
    assert parse(text, TOOLS) == expected


@pytest.mark.parametrize(("written", "made"), LFM, ids=[text[:30] for text, _ in LFM])
def test_calls_of_lfm_are_literals(written: str, made: tuple[ParsedCall, ...]) -> None:
    for end in ("<|tool_call_end|>", ""):
        assert parse_lfm(f"So:<|tool_call_start|>{written}{end}") == ParsedTurn("So:", None, made)
    assert parse_lfm("no call") == ParsedTurn("no call")


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        ("text", "12", "12"),
        ("text", '{"a": 1}', '{"a": 1}'),
        ("text", "two\nlines <b> né", "two\nlines <b> né"),
        ("code", "12", "12"),
        ("note", "12", "12"),
        ("limit", "12", 12),
        ("limit", "many", "many"),  # the environment refuses it
        ("deep", "true", True),
        ("tags", '["a", "b"]', ["a", "b"]),
        ("unknown", "12", "12"),
    ],
)
def test_values_of_qwen_coder_have_the_types_of_the_schema(name: str, written: str, value: object) -> None:
    text = f"<tool_call>\n<function=search>\n<parameter={name}>\n{written}\n</parameter>\n</function>\n</tool_call>"
    turn = parse_qwen_coder(text, [SEARCH])
    assert turn == calls(ParsedCall("search", turn.calls[0].arguments))
    assert json.loads(turn.calls[0].arguments) == {name: value}
    assert json.loads(parse_qwen_coder(text).calls[0].arguments) == {name: written}  # the tool is not known


@pytest.mark.parametrize("parse", PARSERS)
@pytest.mark.parametrize(
    ("start", "piece"),
    [
        *(("", piece) for piece in ("word ", "a>", "<tool_call>", "<arg_key>", "<|channel|>", " \n")),
        *(("<tool_call>f", piece) for piece in ("<arg_key>", "<arg_key></arg_key><arg_value>", "<function=")),
        ("<tool_call><function=f>", "<parameter="),
        ("<tool_call>f<arg_key>", " "),
        ("<|tool_call_start|>[f(a=", "[{1:"),
    ],
)
def test_long_turns_without_an_end_take_linear_time(parse: Parser, start: str, piece: str) -> None:
    """With a quadratic search, each of these is a matter of minutes."""
    text = start + piece * (400_000 // len(piece))
    assert len(parse(text, [SEARCH]).calls) < len(text)


@pytest.mark.parametrize("parse", PARSERS)
def test_values_that_are_nested_deeply_are_parsed_or_malformed(parse: Parser) -> None:
    """Some depths can be read, and not written again."""
    for depth in range(300, 1000, 7):
        value = "[" * depth + "]" * depth
        for text in (
            f'<tool_call>{{"name": "add", "arguments": {{"tags": {value}}}}}</tool_call>',
            f'[TOOL_CALLS][{{"name": "add", "arguments": {{"tags": {value}}}}}]',
            f"<tool_call><function=search><parameter=tags>{value}</parameter></function></tool_call>",
            f"<tool_call>search<arg_key>tags</arg_key><arg_value>{value}</arg_value></tool_call>",
            f"<|tool_call_start|>[add(tags={value})]",
        ):
            parse(text, [SEARCH])


@pytest.mark.parametrize(
    ("template", "parser"),
    [
        (None, parse_hermes),
        ("{{ messages }}", parse_hermes),
        ("<|im_start|> <tool_call> <function=...>", parse_qwen_coder),
        ("<|im_start|> <tool_call>", parse_hermes),
        ("<|start_header_id|>", parse_llama),
        ("<tool_call> <arg_key>", parse_glm),
        ("<|tool_call_start|>", parse_lfm),
        ("<｜Assistant｜> <｜tool▁calls▁begin｜>", parse_deepseek),
        ("[INST] [TOOL_CALLS]", parse_mistral),
        ("<|start|> <|channel|>", parse_harmony),
    ],
)
def test_the_parser_follows_the_template(template: str | None, parser: Parser) -> None:
    assert parser_for(template) is parser
