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
    split_reasoning,
)
from rlframework.datasets.chat.tool_calls import ParsedCall, ParsedTurn

ADD = ParsedCall("add", '{"a": 1}')
NOW = ParsedCall("now", "{}")


def call(name: str, arguments: str) -> ParsedCall:
    return ParsedCall(name, arguments)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>', ParsedTurn("", None, (ADD,))),
        (
            'Two:\n<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>\n'
            '<tool_call>{"name": "now"}</tool_call>',
            ParsedTurn("Two:", None, (ADD, NOW)),
        ),
        # arguments that are JSON text stay as they are, also where they are none
        ('<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', ParsedTurn("", None, (ADD,))),
        ('<tool_call>{"name": "add", "arguments": "x"}</tool_call>', ParsedTurn("", None, (call("add", "x"),))),
        # malformed: the text is there to see
        ('<tool_call>{"name": "add", </tool_call>', ParsedTurn("", None, (call("", '{"name": "add",'),))),
        ('<tool_call>\n{"name": "add"', ParsedTurn("", None, (call("", '{"name": "add"'),))),  # cut off
        ("<tool_call>[1]</tool_call>", ParsedTurn("", None, (call("", "[1]"),))),
        ('<tool_call>{"name": 5}</tool_call>', ParsedTurn("", None, (call("", '{"name": 5}'),))),
        ('<tool_call>{"name": ""}</tool_call>', ParsedTurn("", None, (call("", '{"name": ""}'),))),
        ("<tool_call></tool_call>", ParsedTurn("", None, (call("", ""),))),
        ("<tool_call>" + "[" * 100_000, ParsedTurn("", None, (call("", "[" * 100_000),))),
        # no call
        (" no call\n", ParsedTurn(" no call\n")),
        ("</tool_call>", ParsedTurn("</tool_call>")),
        ("", ParsedTurn("")),
        # reasoning is no place for calls
        (
            '<think>\n<tool_call>{"name": "now"}</tool_call>\n</think>\n\nNo.',
            ParsedTurn("No.", '<tool_call>{"name": "now"}</tool_call>'),
        ),
        ("<think>\nendless", ParsedTurn("", "endless")),
        ("opened by the prompt\n</think>\n\n3", ParsedTurn("3", "opened by the prompt")),
    ],
)
def test_hermes(text: str, expected: ParsedTurn) -> None:
    assert parse_hermes(text, ()) == expected


SEARCH: Any = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "",
        "parameters": {
            "type": "object",
            "properties": {
                "text": {"type": "string"},
                "code": {"type": ["string", "null"]},
                "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                "limit": {"type": "integer"},
                "deep": {"type": "boolean"},
                "tags": {"type": "array"},
            },
        },
    },
}


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
    assert (turn.content, turn.reasoning, len(turn.calls)) == ("", None, 1)
    assert turn.calls[0].name == "search"
    assert json.loads(turn.calls[0].arguments) == {name: value}
    assert json.loads(parse_qwen_coder(text).calls[0].arguments) == {name: written}  # the tool is not known


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Both:\n<tool_call>\n<function=search>\n<parameter=limit>\n1\n</parameter>\n<parameter=text>\na\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            ParsedTurn("Both:", None, (call("search", '{"limit": 1, "text": "a"}'), NOW)),
        ),
        # parameters that are not closed, and a call that is cut off
        (
            "<tool_call><function=search><parameter=limit>1<parameter=text>a</function></tool_call>",
            ParsedTurn("", None, (call("search", '{"limit": 1, "text": "a"}'),)),
        ),
        (
            "<tool_call>\n<function=search>\n<parameter=text>\nab",
            ParsedTurn("", None, (call("search", "<parameter=text>\nab"),)),
        ),
        # other forms
        ("<tool_call><function=search>{a</function></tool_call>", ParsedTurn("", None, (call("search", "{a"),))),
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', ParsedTurn("", None, (ADD,))),
        ("<tool_call>search(1)</tool_call>", ParsedTurn("", None, (call("", "search(1)"),))),
        ("no call", ParsedTurn("no call")),
        ("<think>\nwhy\n</think>\n\nno", ParsedTurn("no", "why")),
    ],
)
def test_qwen_coder(text: str, expected: ParsedTurn) -> None:
    assert parse_qwen_coder(text, [SEARCH]) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"name": "add", "parameters": {"a": 1}}', ParsedTurn("", None, (ADD,))),
        ('\n{"name": "add", "arguments": {"a": 1}}\n', ParsedTurn("", None, (ADD,))),
        ('Hm.<|python_tag|>{"name": "add", "parameters": {"a": 1}}', ParsedTurn("Hm.", None, (ADD,))),
        (
            '<|python_tag|>{"name": "add", "parameters": {"a": 1}}; {"name": "now", "parameters": {}}',
            ParsedTurn("", None, (ADD, NOW)),
        ),
        (
            '<|python_tag|>{"name": "add", "parameters": {"a": "b; c"}}; {"name": "now"}',
            ParsedTurn("", None, (call("add", '{"a": "b; c"}'), NOW)),
        ),
        # malformed
        ("<|python_tag|>add.call(a=1; b)", ParsedTurn("", None, (call("", "add.call(a=1; b)"),))),
        (
            '<|python_tag|>{"name": "now"}; {"name": ',
            ParsedTurn("", None, (NOW, call("", '{"name":'))),
        ),
        ('<|python_tag|>{"name": "now"} and', ParsedTurn("", None, (call("", '{"name": "now"} and'),))),
        ("<|python_tag|>", ParsedTurn("", None, (call("", ""),))),
        (
            '{"name": "add", "parameters": {"a": 1}',
            ParsedTurn("", None, (call("", '{"name": "add", "parameters": {"a": 1}'),)),
        ),
        # text before an object that names a tool and ends the turn
        ('I add.\n\n{"name": "add", "parameters": {"a": 1}}', ParsedTurn("I add.", None, (ADD,))),
        (
            'Hm {1}: { "name": "add", "parameters": {"a": 1}}; {"name": "now"}',
            ParsedTurn("Hm {1}:", None, (ADD, NOW)),
        ),
        (
            'I add. {"name": "add", "parameters": {"a"',
            ParsedTurn("I add.", None, (call("", '{"name": "add", "parameters": {"a"'),)),
        ),
        # answers
        (
            'Use {"name": "add", "parameters": {"a": 1}} for it.',
            ParsedTurn('Use {"name": "add", "parameters": {"a": 1}} for it.'),
        ),
        ('It is {"name": "other", "parameters": {}}', ParsedTurn('It is {"name": "other", "parameters": {}}')),
        ('{"name": "Ann", "age": 3}', ParsedTurn('{"name": "Ann", "age": 3}')),
        (" 3 ", ParsedTurn(" 3 ")),
    ],
)
def test_llama(text: str, expected: ParsedTurn) -> None:
    tools: list[Any] = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
    assert parse_llama(text, tools) == expected


KEYS = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # GLM-4.5, with several values of their types, and GLM-5 without line breaks
        (
            "\n<think>why</think>\nBoth:\n<tool_call>search\n"
            + KEYS.format("limit", 1)
            + KEYS.format("text", "12 ")
            + "</tool_call>\n<tool_call>now\n</tool_call>",
            ParsedTurn("Both:", "why", (call("search", '{"limit": 1, "text": "12 "}'), NOW)),
        ),
        (
            '</think><tool_call>search<arg_key>tags</arg_key><arg_value>["a"]</arg_value></tool_call>',
            ParsedTurn("", "", (call("search", '{"tags": ["a"]}'),)),
        ),
        # cut off, where a value may be incomplete, and malformed
        (
            "<tool_call>search\n<arg_key>limit</arg_key>\n<arg_value>1",
            ParsedTurn("", None, (call("search", "<arg_key>limit</arg_key>\n<arg_value>1"),)),
        ),
        ("<tool_call>sea", ParsedTurn("", None, (call("", "sea"),))),
        (
            "<tool_call>search<arg_key>limit</arg_key></tool_call>",
            ParsedTurn("", None, (call("search", "<arg_key>limit</arg_key>"),)),
        ),
        ("<tool_call></tool_call>", ParsedTurn("", None, (call("", ""),))),
        # another form
        ('<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>', ParsedTurn("", None, (ADD,))),
        ("no call", ParsedTurn("no call")),
    ],
)
def test_glm(text: str, expected: ParsedTurn) -> None:
    assert parse_glm(text, [SEARCH]) == expected


@pytest.mark.parametrize(
    ("written", "calls"),
    [
        ("[add(a=1), now()]", (ADD, NOW)),
        ("add(a=1)", (ADD,)),
        (r"""[f(a='it\'s \d', b=["x", -1.5, None], c={"k": true, "n": null})]""",
         (call("f", r"""{"a": "it's \\d", "b": ["x", -1.5, null], "c": {"k": true, "n": null}}"""),)),
        ("[add(\n  a=1),\n now()]", (ADD, NOW)),
        ("[say(text='two\nlines')]", (call("say", '{"text": "two\\nlines"}'),)),
        ("[web.search(q='é')]", (call("web.search", '{"q": "é"}'),)),
        # malformed: the text is there to see, and nothing is evaluated
        *((text, (call("", text),)) for text in (
            "[add(1)]", "[add(a=1]", "[add(a=open('x'))]", "[add(a=1, a=2)]", "[add(**{})]", "[]", "", "a b", "[1]",
            "[add(a=x)]", "[add(a={1, 2})]", "[add(a=" + "(" * 9000, "[add(a=" + "-" * 9000 + "1)]", "[add(a='\x00')]",
        )),
    ],
    ids=lambda value: value[:30] if isinstance(value, str) else "",
)  # fmt: skip
def test_lfm(written: str, calls: tuple[ParsedCall, ...]) -> None:
    for end in ("<|tool_call_end|>", ""):
        assert parse_lfm(f"So:<|tool_call_start|>{written}{end}") == ParsedTurn("So:", None, calls)
    assert parse_lfm("no call") == ParsedTurn("no call")


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
    ("text", "expected"),
    [
        ('[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}, {"name": "now"}]', ParsedTurn("", None, (ADD, NOW))),
        ('So: [TOOL_CALLS] {"name": "add", "arguments": {"a": 1}}', ParsedTurn("So:", None, (ADD,))),
        ('[TOOL_CALLS]add[ARGS]{"a": 1}[TOOL_CALLS]now[ARGS]{}', ParsedTurn("", None, (ADD, NOW))),
        ("[TOOL_CALLS]add[ARGS]{a", ParsedTurn("", None, (call("add", "{a"),))),
        ('[TOOL_CALLS] [{"name": "add", ', ParsedTurn("", None, (call("", '[{"name": "add",'),))),
        ("[TOOL_CALLS][]", ParsedTurn("", None, (call("", "[]"),))),
        ("[TOOL_CALLS][1]", ParsedTurn("", None, (call("", "1"),))),
        ("[THINK]why[/THINK]3", ParsedTurn("3", "why")),
        (" 3", ParsedTurn(" 3")),
    ],
)
def test_mistral(text: str, expected: ParsedTurn) -> None:
    assert parse_mistral(text, ()) == expected


BEGIN, END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL, CALLED, SEP = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # V3 and R1
        (
            f'Yes.{BEGIN}{CALL}function{SEP}add\n```json\n{{"a": 1}}\n```{CALLED}\n'
            f"{CALL}function{SEP}now\n```json\n{{}}\n```{CALLED}{END}",
            ParsedTurn("Yes.", None, (ADD, NOW)),
        ),
        # V3.1
        (f'{BEGIN}{CALL}add{SEP}{{"a": 1}}{CALLED}{CALL}now{SEP}{{}}{CALLED}{END}', ParsedTurn("", None, (ADD, NOW))),
        # malformed, and cut off
        (f"{BEGIN}{CALL}add{{}}{CALLED}{END}", ParsedTurn("", None, (call("", "add{}"),))),
        (f"{BEGIN}add", ParsedTurn("", None, (call("", "add"),))),
        (f'{BEGIN}{CALL}function{SEP}add\n```json\n{{"a"', ParsedTurn("", None, (call("add", '{"a"'),))),
        (f"{BEGIN}{CALL}function{SEP}add", ParsedTurn("", None, (call("add", ""),))),
        ("why\n</think>\n\n3", ParsedTurn("3", "why")),
        ("3", ParsedTurn("3")),
    ],
)
def test_deepseek(text: str, expected: ParsedTurn) -> None:
    assert parse_deepseek(text, ()) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|>3", ParsedTurn("3")),
        (
            "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>final<|message|>3",
            ParsedTurn("3", "why"),
        ),
        # the recipient before the channel, and after it
        (
            "<|channel|>analysis<|message|>why<|end|><|start|>assistant to=functions.add<|channel|>commentary json"
            '<|message|>{"a": 1}',
            ParsedTurn("", "why", (ADD,)),
        ),
        (
            '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}<|call|>',
            ParsedTurn("", None, (ADD,)),
        ),
        # a preamble for the user, then a malformed call
        (
            "<|channel|>commentary<|message|>Let me.<|end|><|start|>assistant<|channel|>commentary to=functions.add"
            "<|message|>{a",
            ParsedTurn("Let me.", None, (call("add", "{a"),)),
        ),
        ("<|channel|>analysis<|message|>endless", ParsedTurn("", "endless")),
        (
            "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b<|end|>",
            ParsedTurn("", "a\nb"),
        ),
        ("no channel", ParsedTurn("no channel")),
    ],
)
def test_harmony(text: str, expected: ParsedTurn) -> None:
    assert parse_harmony(text, ()) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<think>a</think>b", ("a", "b")),
        ("\n<think>\na\n</think>\n\nb\n", ("a", "b\n")),
        ("a</think>b</think>c", ("a", "b</think>c")),
        ("<think></think>b", ("", "b")),
        ("b <think>a", (None, "b <think>a")),
    ],
)
def test_reasoning_is_before_the_content(text: str, expected: tuple[str | None, str]) -> None:
    assert split_reasoning(text) == expected


def test_the_parser_follows_the_template() -> None:
    assert parser_for(None) is parse_hermes
    assert parser_for("{{ messages }}") is parse_hermes
    assert parser_for("<|im_start|> <tool_call> <function=...>") is parse_qwen_coder
    assert parser_for("<|im_start|> <tool_call>") is parse_hermes
    assert parser_for("<|start_header_id|>") is parse_llama
    assert parser_for("<tool_call> <arg_key>") is parse_glm
    assert parser_for("<|tool_call_start|>") is parse_lfm
    assert parser_for("<｜Assistant｜> <｜tool▁calls▁begin｜>") is parse_deepseek
    assert parser_for("[INST] [TOOL_CALLS]") is parse_mistral
    assert parser_for("<|start|> <|channel|>") is parse_harmony
