"""The calls of published models are read in the form that their chat template writes, or tools are rejected."""

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
def test_a_sample_of_published_templates_has_its_own_calls_read_or_is_rejected() -> None:
    assert [name for name in published_templates.names()[::40] if own_call(name) is False] == []


@pytest.mark.thorough
def test_all_published_templates_have_their_own_calls_read_or_are_rejected() -> None:
    found = {name: own_call(name) for name in published_templates.names()}
    assert [name for name, read in found.items() if read is False] == []
    assert sum(read is True for read in found.values()) > 600


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
