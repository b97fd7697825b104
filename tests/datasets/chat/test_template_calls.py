"""Tool calls of earlier turns in the chat templates of published models: whatever their arguments are, they render."""

from __future__ import annotations

from typing import Any

import published_templates
import pytest
from chat_formats import TOOLS

from rlframework.base.errors import DataError
from rlframework.datasets.chat.chat_template import apply_template, knows_tools

PROBE = "7305186249"
ARGUMENTS = (
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
    found = {arguments: rendered(arguments) for arguments in ARGUMENTS}
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
def test_arguments_are_rendered_by_a_sample_of_published_templates() -> None:
    some = published_templates.names()[::20]
    assert {name: kinds for name in some if (kinds := rejected(name))} == {}


@pytest.mark.thorough
def test_arguments_are_rendered_by_all_published_templates() -> None:
    names = published_templates.names()
    assert {name: kinds for name in names if (kinds := rejected(name))} == {}
    assert sum(takes(name, {"a": 1}) and not takes(name, '{"a":') for name in names) > 100


def test_a_template_that_has_no_form_for_tools_gets_them_as_text() -> None:
    """R1's distilled models write calls beside the content null alone, Phi-4 has tools in the system message."""
    for name in ("deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "microsoft-Phi-4-mini-reasoning"):
        model = published_templates.with_template(name)
        assert "tool" in model.chat_template
        assert not knows_tools(model)
        text = apply_template(model, conversation('{"a": 7305186249}'), TOOLS, prompt=True)
        assert 'Call one by writing <tool_call>{"name": NAME, "arguments": {...}}</tool_call>' in text
        assert '<tool_call>\n{"name": "add", "arguments": {"a": 7305186249}}\n</tool_call>' in text
