"""Random turns of a model through published chat templates: whatever it writes, the conversation goes on."""

from __future__ import annotations

import random
from typing import Any

import published_templates
import pytest
from chat_formats import TOOLS

from rlframework.base.errors import DataError
from rlframework.datasets.chat.chat_format import ChatFormat
from rlframework.datasets.chat.chat_template import apply_template
from rlframework.interfaces.messages import Message

ASK: Message = {"role": "user", "content": "1+2?"}
PIECES = (
    '{"name": "add", "arguments": {"a": 1}}', '{"name": "add", "parameters": {"a":', '{"a": "\\ud83d"}',
    '{"name": "\\ud800", "arguments": "x"}', "[1]", "null", '"', "'", "\n", "{", "}", "[", "add(a=1)", "é 日本 😀",
    "\\", "the answer is 3", "<think>", "</think>", "<tool_call>", "</tool_call>", "<function=add>", "<parameter=a>",
    "</parameter>", "</function>", "<arg_key>a</arg_key>", "<arg_value>", "<|tool_call_start|>", "[add(a=1)]",
    "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", ";", "{{ x }}", "{% if %}", '{"a":' * 3000, "\x00",
)  # fmt: skip
REJECTING = {"nvidia-llama-nemotron-embed-vl-1b-v2"}
"""Templates that take no answer of a model at all."""


def native_call(model: Any) -> str:
    """A call of `add` as the template of `model` writes it, and what it writes before."""
    call: Any = {"id": "abcdef000", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    try:
        return apply_template(model, [ASK, {"role": "assistant", "content": "", "tool_calls": [call]}], TOOLS)[-200:]
    except DataError:
        return PIECES[0]


def random_turn(name: str, model: Any, rng: random.Random) -> str:
    """A native call with up to three changes, or pieces of calls and marks of the template in any order."""
    if rng.random() < 0.3:
        return "".join(rng.choices([*PIECES, *published_templates.marks(name)], k=rng.randint(0, 8)))
    text = native_call(model)
    start = text.rfind(rng.choice(["add", "<", "[", "{"])) if rng.random() < 0.3 else text.find("assistant")
    text = text[max(start, 0) :]
    for _ in range(rng.randint(0, 3)):
        begin = rng.randint(0, len(text))
        end = min(len(text), begin + rng.randint(0, 12))
        text = rng.choice(
            [
                text[:begin] + text[end:],
                text[:begin] + rng.choice(PIECES) + text[begin:],
                text[:begin],
                text + text[begin:],
            ]
        )
    return text


def answers(reply: Message) -> list[Message]:
    """The messages of an environment after `reply`: an error for each call, with its name, or another question."""
    calls = reply.get("tool_calls", ())
    results: list[Message] = [
        {"role": "tool", "content": f"error: {call['function']['name']}", "tool_call_id": call["id"]} for call in calls
    ]
    return results or [{"role": "user", "content": "again"}]


def play(name: str, tools: list[Any], rng: random.Random) -> int:
    """Play two turns with the template; return how many had calls."""
    model = published_templates.with_template(name)
    chat = ChatFormat(model)
    messages, calling = [ASK], 0
    try:
        prompt = chat.prompt(messages, tools)
    except DataError:  # before anything is sampled
        return 0
    for _ in range(2):
        ids = model(random_turn(name, model, rng), add_special_tokens=False)["input_ids"]
        ids += [model.eos_token_id] if rng.random() < 0.8 else []
        reply = chat.parse(ids, tools, position=len(messages))
        assert tools or "tool_calls" not in reply
        calling += "tool_calls" in reply
        new = answers(reply)
        extended = chat.extend([*prompt, *ids], [*messages, reply], new, tools)
        messages = [*messages, reply, *new]
        prompt = chat.prompt(messages, tools) if extended is None else extended
    return calling


def calls_in(names: list[str], rounds: int) -> int:
    """How many turns of `rounds` conversations with each template, with and without tools, have calls."""
    found = 0
    for name in names:
        rng = random.Random(name)
        for _ in range(0 if name in REJECTING else rounds):
            found += play(name, TOOLS, rng) + play(name, [], rng)
    return found


@pytest.mark.slow
def test_a_conversation_goes_on_whatever_a_model_writes() -> None:
    """3 conversations with and without tools for each 20th template, of which three quarters take tools."""
    assert calls_in(published_templates.names()[::20], 3) > 50


@pytest.mark.thorough
def test_conversations_with_all_templates_go_on_whatever_a_model_writes() -> None:
    assert calls_in(published_templates.names(), 5) > 2000
