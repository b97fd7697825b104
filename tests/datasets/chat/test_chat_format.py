"""Chat formats at the edges: parallel results, tokenizers that add spaces, opened reasoning, changed history."""

from __future__ import annotations

import json
import random
import re
from copy import deepcopy
from typing import Any

import pytest
from chat_formats import NAMES, TOOLS, Turn, sampled, tokenizer, written

from rlframework.datasets.chat.chat_format import ChatFormat
from rlframework.interfaces.messages import Message

ASK: Message = {"role": "user", "content": "1+2?"}
CONTENT = "message['content']"
"""The part of ChatML's template that writes the content of a turn."""


def with_template(template: str, name: str = "chatml") -> Any:
    made = deepcopy(tokenizer(name))
    made.chat_template = template
    return made


def with_special(name: str) -> Any:
    """The tokenizer with a special token that no template writes."""
    made = deepcopy(tokenizer(name))
    made.add_special_tokens({"additional_special_tokens": ["<sampled>"]})
    return made


def reply_to(chat: ChatFormat, model: Any, text: str) -> tuple[list[int], Message]:
    """The history after a turn that was sampled as `text`, and its message."""
    ids = model(text, add_special_tokens=False)["input_ids"]
    return [*chat.prompt([ASK]), *ids], chat.parse(ids, TOOLS)


def two_calls(name: str) -> str:
    """The text of a turn that calls `add` twice, with its end."""
    one, end = written(name, Turn("", None, {"a": 1}))
    other = written(name, Turn("", None, {"a": 22}))[0]
    if name == "mistral":
        return f"{one[:-1]}, {other.removeprefix('[TOOL_CALLS] [')}{end}"
    if name == "deepseek_v31":
        return one.removesuffix("<｜tool▁calls▁end｜>") + other.removeprefix("<｜tool▁calls▁begin｜>") + end
    if name == "deepseek":
        return one.removesuffix("<｜tool▁calls▁end｜>") + "\n" + other.removeprefix("<｜tool▁calls▁begin｜>") + end
    return f"{one}\n{other}{end}"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("gpt_oss", "llama3")])  # those have one call
def test_results_of_parallel_calls_follow_the_calls(name: str) -> None:
    """Two calls of one turn and both results: the exact tokens end with the text of the whole rendering."""
    chat, model = ChatFormat(tokenizer(name)), tokenizer(name)
    ids = sampled(name, two_calls(name), random.Random(0))
    reply = chat.parse(ids, TOOLS)
    assert [json.loads(call["function"]["arguments"]) for call in reply["tool_calls"]] == [{"a": 1}, {"a": 22}]
    assert len({call["id"] for call in reply["tool_calls"]}) == 2
    new: list[Message] = [
        {"role": "tool", "content": result, "name": "add", "tool_call_id": call["id"]}
        for call, result in zip(reply["tool_calls"], ("one", "two"), strict=True)
    ]
    history = [*chat.prompt([ASK], TOOLS), *ids]
    extended = chat.extend(history, [ASK, reply], new, TOOLS)
    assert extended is not None
    assert extended[: len(history)] == history
    tail = model.decode(extended[len(history) :])
    assert model.decode(chat.prompt([ASK, reply, *new], TOOLS)).endswith(tail)
    assert tail.index("one") < tail.index("two")


def test_several_calls_where_the_template_has_one_are_malformed() -> None:
    """Llama 3's template raises an error for two calls: what a model writes must not stop its episode."""
    chat, model = ChatFormat(tokenizer("llama3")), tokenizer("llama3")
    text = '<|python_tag|>{"name": "add", "parameters": {}}; {"name": "add", "parameters": {"a": 1}}'
    history, reply = reply_to(chat, model, f"{text}<|eot_id|>")
    [call] = reply["tool_calls"]
    assert call["function"] == {"name": "", "arguments": text}
    refused: Message = {"role": "tool", "content": "one call only", "tool_call_id": call["id"]}
    extended = chat.extend(history, [ASK, reply], [refused])
    assert extended is not None
    assert "one call only" in model.decode(extended[len(history) :])


def test_a_call_with_reasoning_and_a_preamble_does_not_stop_the_episode() -> None:
    """The template of gpt-oss raises an error for content and reasoning beside a call, which its models write."""
    chat, model = ChatFormat(tokenizer("gpt_oss")), tokenizer("gpt_oss")
    text = (
        "<|channel|>analysis<|message|>why<|end|><|start|>assistant<|channel|>commentary<|message|>Let me.<|end|>"
        '<|start|>assistant to=functions.add<|channel|>commentary json<|message|>{"a": 1}<|call|>'
    )
    history, reply = reply_to(chat, model, text)
    assert (reply["content"], reply["reasoning_content"]) == ("Let me.", "why")
    answer: Message = {"role": "tool", "content": "3", "tool_call_id": reply["tool_calls"][0]["id"]}
    extended = chat.extend(history, [ASK, reply], [answer], TOOLS)
    assert extended is not None
    assert extended[: len(history)] == history
    tail = '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"3"<|end|><|start|>assistant'
    assert model.decode(extended[len(history) :]) == tail


R1 = (
    "{% for m in messages %}{% if m.role == 'user' %}{{ '<|im_start|>U' + m.content }}"
    "{% else %}{{ '<|im_start|>A' + m.content.split('</think>')[-1] + '<|im_end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>A<think>\\n' }}{% endif %}"
)
KEPT = R1.replace(
    "m.content.split('</think>')[-1]", "'<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' + m.content"
)


def test_a_prompt_that_opens_reasoning_which_history_drops_begins_a_row() -> None:
    """As DeepSeek-R1: the thought has no name of its own in the template, so it is part of the content."""
    model = with_template(R1)
    chat = ChatFormat(model)
    history, reply = reply_to(chat, model, "why\n</think>\n\n3<|im_end|>")
    assert reply == {"role": "assistant", "content": "why\n</think>\n\n3"}
    assert chat.extend(history, [ASK, reply], [ASK]) is None
    assert "why" not in model.decode(chat.prompt([ASK, reply, ASK]))


def test_a_prompt_that_opens_reasoning_which_history_keeps_is_extended() -> None:
    model = with_template(KEPT)
    chat = ChatFormat(model)
    history, reply = reply_to(chat, model, "why\n</think>\n\n3<|im_end|>")
    assert reply == {"role": "assistant", "content": "3", "reasoning_content": "why"}
    extended = chat.extend(history, [ASK, reply], [ASK])
    assert extended is not None
    assert model.decode(extended) == model.decode(chat.prompt([ASK, reply, ASK]))
    cut, unfinished = reply_to(chat, model, "why and why")
    assert unfinished == {"role": "assistant", "content": "", "reasoning_content": "why and why"}
    assert model.decode(cut).endswith("<think>\nwhy and why")


def test_a_turn_that_the_template_changes_is_not_extended() -> None:
    plain = tokenizer("chatml").chat_template
    assert CONTENT in plain
    for changed in (f"({CONTENT} | upper)", f"({CONTENT} | replace('bc', ''))"):
        model = with_template(plain.replace(CONTENT, changed))
        chat = ChatFormat(model)
        history, reply = reply_to(chat, model, "abcd<|im_end|>")
        assert chat.extend(history, [ASK, reply], [ASK]) is None
        history, reply = reply_to(chat, model, "12<|im_end|>")
        assert chat.extend(history, [ASK, reply], [ASK]) is not None


def test_without_a_template_texts_follow_one_another() -> None:
    model = with_template("")
    model.chat_template = None
    chat = ChatFormat(model)
    assert model.decode(chat.extend([5, 6], [ASK], [ASK]) or []) == model.decode([5, 6]) + "1+2?"
    assert chat.turn_end_ids == {model.eos_token_id}


@pytest.mark.parametrize("template", [None, "{% for m in messages %}{{ m.content + '?' }}{% endfor %}"])
def test_a_text_that_follows_another_gets_no_space(template: Any) -> None:
    """Nothing ends a turn here, so the new text follows plain text. The tokenizer puts a space before the first one."""
    model = with_template(template, "mistral")
    chat = ChatFormat(model)
    history, reply = reply_to(chat, model, "3")
    extended = chat.extend(history, [ASK, reply], [{"role": "user", "content": "4"}])
    assert extended is not None
    assert extended[: len(history)] == history
    assert model.decode(extended[len(history) - 1 :]) == ("34" if template is None else "3?4?")


@pytest.mark.parametrize("name", NAMES)
def test_special_tokens_that_were_sampled_are_no_text(name: str) -> None:
    """As in single turns, whose texts are decoded without them."""
    model = with_special(name)
    ids = model("<sampled>12<sampled>", add_special_tokens=False)["input_ids"]
    assert ChatFormat(model).parse(ids)["content"] == model.decode(ids, skip_special_tokens=True)


def test_without_tools_reasoning_is_apart_and_what_follows_is_text() -> None:
    thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant"
    for name, text, reasoning, content in (
        ("qwen3", "<think>\nhm\n</think>\n\n<tool_call>{}</tool_call>", "hm", "<tool_call>{}</tool_call>"),
        ("gpt_oss", f"{thought} to=functions.add<|channel|>commentary json<|message|>{{}}<|call|>", "hm",
         " to=functions.addcommentary json{}"),
        ("gpt_oss", f"{thought}<|channel|>final<|message|>3<|return|>", "hm", "3"),
    ):  # fmt: skip
        model = tokenizer(name)
        reply = ChatFormat(model).parse(model(text, add_special_tokens=False)["input_ids"], [])
        assert (reply.get("reasoning_content"), reply["content"]) == (reasoning, content)


def test_ids_of_calls_are_unique_where_turns_repeat() -> None:
    """The same tokens in each of four turns, twice the same call in each."""
    model = tokenizer("qwen3")
    chat, call = ChatFormat(model), written("qwen3", Turn("", None, {"a": 1}))[0]
    ids = model(call * 2, add_special_tokens=False)["input_ids"]
    turns = [chat.parse(ids, TOOLS, position=2 * turn + 1) for turn in range(4)]
    assert len({call["id"] for turn in turns for call in turn["tool_calls"]}) == 8
    assert all(re.fullmatch("[0-9a-f]{9}", call["id"]) for turn in turns for call in turn["tool_calls"])
    assert chat.parse(ids, TOOLS, position=1) == turns[0]


def test_halves_of_characters_in_a_call_are_replaced() -> None:
    """JSON can spell them: no tokenizer takes them, and no file."""
    model = tokenizer("qwen3")
    for text in ('{"name": "\\ud83d", "arguments": {"a": "\\ud83d"}}', '{"name": "add", "arguments": "\\udc00"}'):
        reply = ChatFormat(model).parse(model(f"<tool_call>{text}</tool_call>")["input_ids"], TOOLS)
        assert json.dumps(reply, ensure_ascii=False).encode()
        rendered = ChatFormat(model).prompt([ASK, reply, {"role": "user", "content": "a"}], TOOLS)
        assert "?" in model.decode(rendered)
