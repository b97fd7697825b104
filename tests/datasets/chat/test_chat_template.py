"""Messages as chat templates read them: the form of arguments, and tools for templates that know none."""

from __future__ import annotations

import json
from copy import deepcopy
from typing import Any

import pytest
from chat_formats import NAMES, TOOLS, tokenizer

from rlframework.base.errors import DataError
from rlframework.datasets.chat.chat_format import ChatFormat
from rlframework.datasets.chat.chat_template import (
    apply_template,
    template_message,
    without_template_warnings,
)
from rlframework.datasets.chat.rendering import render_conversation, render_prompt
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.messages import Message

ASK: Message = {"role": "user", "content": "1+2?"}


def call(arguments: str) -> Message:
    function: Any = {"name": "add", "arguments": arguments}
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": function}],
    }


def test_a_template_that_wants_text_gets_arguments_as_text() -> None:
    """DeepSeek's concatenates the arguments, Qwen's writes a mapping as JSON: both write the JSON once."""
    for name in ("deepseek", "qwen3"):
        text = apply_template(tokenizer(name), [ASK, call('{"a": 1}')])
        assert text.count('{"a": 1}') == 1, text
        ids, mask = render_conversation(tokenizer(name), [ASK, call('{"a": 1}')], tools=TOOLS)
        trained = [token for token, kept in zip(ids, mask, strict=True) if kept]
        assert '{"a": 1}' in tokenizer(name).decode(trained)


def test_arguments_and_reasoning_of_a_message() -> None:
    thought: Message = {"role": "assistant", "content": [{"type": "text", "text": "3"}], "reasoning_content": "1+2"}
    assert template_message(thought) == {
        "role": "assistant", "content": "3", "reasoning_content": "1+2", "thinking": "1+2",
    }  # fmt: skip
    for written, given in (('{"a": 1}', {"a": 1}), ("{a", "{a"), ("[1]", "[1]")):
        assert template_message(call(written))["tool_calls"][0]["function"]["arguments"] == given
        assert template_message(call(written), mappings=False) == call(written)


def test_a_template_without_tools_gets_them_as_text() -> None:
    answer: Message = {"role": "tool", "content": "3", "tool_call_id": "call00001"}
    system: Message = {"role": "system", "content": "Be brief."}
    text = apply_template(tokenizer("chatml"), [system, ASK, call('{"a": 1}'), answer], TOOLS, prompt=True)
    listed = json.dumps(TOOLS[0]["function"])
    assert text == (
        f"<|im_start|>system\nBe brief.\n\nYou may call these tools:\n{listed}\n"
        'Call one by writing <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.<|im_end|>\n'
        "<|im_start|>user\n1+2?<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n3\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )
    first = text.partition("<|im_end|>")[0]
    assert apply_template(tokenizer("chatml"), [ASK], TOOLS).startswith(first.replace("Be brief.\n\n", ""))
    assert '{"name": "add", "arguments": "{a"}' in apply_template(tokenizer("chatml"), [ASK, call("{a")])


def test_a_template_with_calls_that_lists_no_tools_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """A warning that was suppressed is not taken for one that was logged."""
    calls = "{% for m in messages %}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
    with without_template_warnings():
        apply_template(character_template(calls), [ASK], TOOLS)
    apply_template(character_template("{{ tools }}" + calls), [ASK], TOOLS)
    apply_template(character_template(calls), [ASK])
    assert not caplog.messages
    for _ in range(2):
        assert apply_template(character_template(calls), [ASK], TOOLS)
    [message] = caplog.messages
    assert "it does not use the variable `tools`), so prompts have no list of them" in message


def test_a_template_without_system_role_has_the_tools_in_the_first_question() -> None:
    """Gemma 2 raises an error for a system message, and for two messages of a user that follow one another."""
    answers: list[Message] = [{"role": "tool", "content": text, "tool_call_id": "call00001"} for text in "34"]
    text = apply_template(tokenizer("gemma2"), [ASK, call('{"a": 1}'), *answers], TOOLS, prompt=True)
    assert text == (
        f"<bos><start_of_turn>user\nYou may call these tools:\n{json.dumps(TOOLS[0]['function'])}\n"
        'Call one by writing <tool_call>{"name": NAME, "arguments": {...}}</tool_call>.\n\n1+2?<end_of_turn>\n'
        '<start_of_turn>model\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call><end_of_turn>\n'
        "<start_of_turn>user\n<tool_response>\n3\n</tool_response>\n<tool_response>\n4\n</tool_response>"
        "<end_of_turn>\n<start_of_turn>model\n"
    )
    system: Message = {"role": "system", "content": "Be brief."}
    with pytest.raises(DataError, match="System role not supported"):
        apply_template(tokenizer("gemma2"), [system, ASK], TOOLS)


def character_template(template: Any) -> Any:
    made: Any = character_tokenizer("ab")
    made.chat_template = template
    return made


def test_a_rejected_conversation_names_its_roles() -> None:
    made = character_template("{% if tool %}{% endif %}{{ raise_exception('roles must alternate') }}")
    for messages in ([ASK], [ASK, call("{}")]):
        roles = [message["role"] for message in messages]
        with pytest.raises(DataError, match="roles must alternate") as raised:
            apply_template(made, messages)
        assert f"roles {roles}" in str(raised.value)
    with pytest.raises(DataError, match="at least one message"):
        apply_template(made, [])


@pytest.mark.parametrize("name", [*NAMES, "no template"])
@pytest.mark.parametrize("tools", [[], TOOLS])
def test_a_rollout_prompt_is_that_of_the_data(name: str, tools: list[Any]) -> None:
    made = tokenizer("chatml" if name == "no template" else name)
    if name == "no template":
        made = deepcopy(made)
        made.chat_template = None
    talk: list[Message] = [
        {"role": "system", "content": "Be brief."}, ASK, {"role": "assistant", "content": "3"},
        {"role": "user", "content": "né, 日本 {x}\n  and [2] <b>?"},
    ]  # fmt: skip
    chat = ChatFormat(made)
    for messages in (talk[1:], talk[1:2]) if name == "gemma2" else (talk, talk[1:], talk[1:2]):  # has no system role
        assert chat.prompt(messages, tools) == render_prompt(made, messages, tools)
    with pytest.raises(DataError):
        chat.prompt([], tools)
    # special tokens that users spell stay text in rollouts alone
    spelled: list[Message] = [{"role": "user", "content": made.eos_token}]
    assert chat.prompt(spelled) != render_prompt(made, spelled)
