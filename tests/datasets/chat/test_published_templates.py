"""Chat templates of published models: their calls are read or tools rejected, and calls of earlier turns render."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import published_templates
import pytest

from rlframework.base.errors import DataError
from rlframework.datasets.chat.chat_format import ChatFormat
from rlframework.datasets.chat.chat_template import apply_template
from rlframework.interfaces.messages import Message

ASK: Message = {"role": "user", "content": "1+2?"}
PROPERTIES = {"a": {"type": "integer"}, "text": {"type": "string"}}
FUNCTION = {"name": "add", "description": "Add.", "parameters": {"type": "object", "properties": PROPERTIES}}
TOOLS: list[Any] = [{"type": "function", "function": FUNCTION}]
ARGUMENTS = {"a": 12, "text": "two words"}
HERMES = '<tool_call>\n{"name": "add", "arguments": {"a": 12, "text": "two words"}}\n</tool_call>'
LLAMA = '{"name": "add", "parameters": {"a": 12, "text": "two words"}}'


def parsed(name: str, text: str) -> Message:
    model = published_templates.with_template(name)
    chat = ChatFormat(model)
    assert chat.prompt([ASK], TOOLS)
    return chat.parse(model(text, add_special_tokens=False)["input_ids"], TOOLS)


@pytest.mark.parametrize(
    ("name", "text", "content"),
    [
        (
            "GLM-4.6",
            (
                "\n<think>hm</think>\nSo:\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>12</arg_value>\n"
                "<arg_key>text</arg_key>\n<arg_value>two words</arg_value>\n</tool_call>"
            ),
            "So:",
        ),
        (
            "zai-org-GLM-5.1",
            (
                "</think><tool_call>add<arg_key>a</arg_key><arg_value>12</arg_value><arg_key>text</arg_key>"
                "<arg_value>two words</arg_value></tool_call>"
            ),
            "",
        ),
        ("LFM2.5-8B-A1B", "So: <|tool_call_start|>[add(a=12, text='two words')]<|tool_call_end|>", "So:"),
        ("meta-llama-Llama-3.1-8B-Instruct", f"I add.\n\n{LLAMA}", "I add."),
        ("meta-llama-Llama-3.1-8B-Instruct", LLAMA, ""),
        # marks of DeepSeek and Llama 3, with calls of Hermes in the template, or described in the prompt
        ("deepseek-ai-DeepSeek-V2-Chat-0628", f"So:\n{HERMES}", "So:"),
        ("NousResearch-Meta-Llama-3-8B-Instruct", f"So:\n{HERMES}", "So:"),
        ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", HERMES, ""),
    ],
)
def test_a_native_call_is_read(name: str, text: str, content: str) -> None:
    reply = parsed(name, text)
    [call] = reply["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("add", ARGUMENTS)
    assert reply["content"] == content


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("LiquidAI-LFM2-1.2B", "it does not write the calls of earlier turns"),
        ("google-gemma-4-26B-A4B-it", "it writes a call as '<|tool_call>call:f"),
        ("Kimi-K2-Instruct", "it rejects a tool call"),
    ],
)
def test_tools_are_rejected_with_a_template_whose_calls_are_not_read(name: str, says: str) -> None:
    model = deepcopy(published_templates.with_template(name))
    model.name_or_path = "some/model"
    chat = ChatFormat(model)
    with pytest.raises(DataError, match=r"tools cannot be used with the chat template of some/model") as raised:
        chat.prompt([ASK], TOOLS)
    assert says in str(raised.value)
    assert "Set policy.chat_template to one that writes calls as Hermes" in str(raised.value)
    assert chat.prompt([ASK])


def own_call(name: str) -> bool | None:
    """Whether the call that the template writes is read; None if it is rejected with tools."""
    model = published_templates.with_template(name)
    chat = ChatFormat(model)
    function: Any = {"name": "add", "arguments": json.dumps(ARGUMENTS)}
    call: Any = {"id": "abcdef000", "type": "function", "function": function}
    try:
        chat.prompt([ASK], TOOLS)
        whole = apply_template(model, [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}], TOOLS)
    except DataError:
        return None
    if ARGUMENTS["text"] not in whole:  # it writes no turns of a model at all, such as that of a reranker
        return None
    found, asked = [], max(whole.rfind("1+2?"), 0)
    for begin in range(asked, len(whole)):  # wherever the turn begins
        if whole[begin] in "<[{" or begin == asked:
            text = whole[begin:]
            for end in chat._text.turn_ends:
                text = text.rpartition(end)[0] or text
            if chat._opens_reasoning and "</think>" not in text:  # the prompt begins it, the rendered turn has none
                text = f"</think>{text}"
            found += chat.parse(model(text, add_special_tokens=False)["input_ids"], TOOLS).get("tool_calls", ())
    calls = [(one["function"]["name"], one["function"]["arguments"]) for one in found]
    return any(
        name == "add" and json.loads(arguments) == ARGUMENTS for name, arguments in calls if arguments[:1] == "{"
    )


@pytest.mark.slow
@pytest.mark.parametrize("step", [40, pytest.param(1, marks=pytest.mark.thorough)], ids=["some", "all"])
def test_published_templates_have_their_own_calls_read_or_are_rejected(step: int) -> None:
    found = {name: own_call(name) for name in published_templates.names()[::step]}
    assert [name for name, read in found.items() if read is False] == []
    assert step > 1 or sum(read is True for read in found.values()) > 600


def test_a_response_template_of_the_tokenizer_comes_first() -> None:
    """Transformers parses the calls of Gemma 4 by it; what it cannot parse is a malformed call."""
    model = deepcopy(published_templates.with_template("google-gemma-4-26B-A4B-it"))
    model.response_template = {
        "start_anchor": "<|turn>model\n",
        "defaults": {"role": "assistant"},
        "fields": {
            "content": {},
            "tool_calls": {
                "open_pattern": r"<\|tool_call>call:(?P<name>\w+)",
                "close": "<tool_call|>",
                "repeats": True,
                "content": "json",
                "content_args": {"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
                "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
            },
        },
    }
    chat = ChatFormat(model)
    assert chat.prompt([ASK], TOOLS)

    def reply(text: str) -> Message:
        return chat.parse(model(text, add_special_tokens=False)["input_ids"], TOOLS)

    found = reply('So: <|tool_call>call:add{a:12,text:<|"|>two words<|"|>}<tool_call|>')
    assert found["content"] == "So:"
    assert json.loads(found["tool_calls"][0]["function"]["arguments"]) == ARGUMENTS
    assert reply("no call") == {"role": "assistant", "content": "no call"}
    [cut] = reply("<|tool_call>call:add{a:")["tool_calls"]
    assert cut["function"] == {"name": "", "arguments": "<|tool_call>call:add{a:"}


PROBE = "7305186249"
WRITTEN = (
    "", '{"a": 7305186249', "[7305186249]", "7305186249", "null", '"7305186249"', '{"a": "7305186249 \\ud83d"}',
    '{"a": {"b": [7305186249, null]}}',
)  # fmt: skip
"""Arguments that a model may write: several kinds of JSON and none, and half of a character."""

ITERATING = (
    "Qwen-Qwen3.5-0.8B", "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "zai-org-GLM-4.5-Air", "GLM-4.6", "GLM-4.7-Flash",
    "LFM2.5-8B-A1B",
)  # fmt: skip
"""Templates that take the items of the arguments."""


def conversation(arguments: Any) -> list[Any]:
    call = {"id": "abcdef000", "type": "function", "function": {"name": "add", "arguments": arguments}}
    return [
        {"role": "user", "content": "1+2?"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "error", "tool_call_id": "abcdef000", "name": "add"},
    ]


def rejected(name: str) -> list[str]:
    """The arguments that the template rejects or leaves out, although it writes those of a well-formed call."""
    model = published_templates.with_template(name)

    def rendered(arguments: str) -> str | None:
        try:
            return apply_template(model, conversation(arguments), TOOLS, prompt=True)
        except DataError:
            return None

    if PROBE not in (rendered(f'{{"a": {PROBE}}}') or ""):
        return []
    found = {arguments: rendered(arguments) for arguments in WRITTEN}
    return [
        arguments
        for arguments, text in found.items()
        if text is None or (PROBE in arguments and PROBE not in text) or "\ud83d" in text
    ]


def takes(name: str, arguments: Any) -> bool:
    """Whether the template itself takes `arguments`, without any of our code."""
    model = published_templates.with_template(name)
    try:
        return bool(model.apply_chat_template(conversation(arguments), tools=TOOLS, tokenize=False))
    except Exception:  # noqa: BLE001 - a template can raise anything
        return False


@pytest.mark.parametrize("name", ITERATING)
def test_arguments_that_are_no_object_are_rendered_where_a_template_wants_one(name: str) -> None:
    assert takes(name, {"a": 1})
    assert not takes(name, '{"a":')
    assert rejected(name) == []


@pytest.mark.slow
@pytest.mark.parametrize("step", [20, pytest.param(1, marks=pytest.mark.thorough)], ids=["some", "all"])
def test_arguments_are_rendered_by_published_templates(step: int) -> None:
    names = published_templates.names()[::step]
    assert {name: kinds for name in names if (kinds := rejected(name))} == {}
    assert step > 1 or sum(takes(name, {"a": 1}) and not takes(name, '{"a":') for name in names) > 100
