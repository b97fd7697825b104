"""Warnings about training rows: turns without an end, and answers within a thought that the prompt begins."""

from __future__ import annotations

from typing import Any

import pytest

from rlframework.datasets.chat.template_checks import RowWarnings, opened_thought
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import Message

PLAIN = "{% for m in messages %}{{ m.role + ':' + m.content + '<eos>' }}{% endfor %}"
PROMPT = "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
OPENED = PLAIN + PROMPT.replace("assistant:", "assistant:<think>")
CLOSED = OPENED.replace("m.role + ':'", "m.role + ':' + ('<think></think>' if m.role == 'assistant' else '')")
COHERE = OPENED.replace("<think>", "<|START_THINKING|>")


def tokenizer(template: str | None) -> Any:
    made: Any = character_tokenizer("abc")
    made.chat_template = template
    return made


def talk(count: int) -> tuple[Message, ...]:
    return tuple({"role": ("user", "assistant")[n % 2], "content": "a"} for n in range(count))


ONE = Sample("one", talk(1), "", "b")
TWO = Sample("two", talk(3), "", "b")
WITHIN = Sample("within", talk(4), "")
GREETED = Sample("greeted", ({"role": "assistant", "content": "a"}, *talk(1)), "", "b")
TEXT = Sample("text", (), "", "b")
REASONED = Sample("reasoned", (*talk(1), {"role": "assistant", "content": "b", "reasoning_content": "a"}), "")


def logged(caplog: Any, template: str | None, train_on: Any, *samples: Sample) -> list[str]:
    warnings = RowWarnings(tokenizer(template), train_on)
    for sample in samples:
        warnings.add([sample])
    warnings.log()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("train_on", ["assistant", "all"])
def test_turns_that_nothing_ends(caplog: Any, train_on: Any) -> None:
    """Without a template: those of rows with several assistant turns after a prompt."""
    [message] = logged(caplog, None, train_on, ONE, GREETED, TEXT, TWO, WITHIN)
    assert message.startswith("2 of 5 rows have several assistant turns (the first: sample 'two') and the tokenizer")
    assert "'<eos>' ends the last turn of a row alone" in message


@pytest.mark.parametrize(("template", "train_on"), [(None, "last"), (PLAIN + PROMPT, "assistant")])
def test_turns_that_are_ended_or_not_trained_on(caplog: Any, template: str | None, train_on: Any) -> None:
    assert logged(caplog, template, train_on, TWO, WITHIN) == []


@pytest.mark.parametrize(
    ("template", "tags"),
    [
        (OPENED, ("<think>", "</think>")),
        (COHERE, ("<|START_THINKING|>", "<|END_THINKING|>")),
        (CLOSED, None),  # the row has the end of the thought, as the template writes it
        (PLAIN + PROMPT, None),
        (None, None),
        ("{{ raise_exception('no') }}", None),
    ],
)
def test_a_thought_that_prompts_begin_and_rows_do_not(template: str | None, tags: tuple[str, str] | None) -> None:
    assert opened_thought(tokenizer(template)) == tags


def test_answers_within_a_thought_are_counted(caplog: Any) -> None:
    ended = Sample("ended", talk(1), "", "a</think>b")
    call: Message = {"role": "assistant", "content": "", "tool_calls": []}
    called = Sample("called", (*talk(1), call | {"tool_calls": [{}]}), "")
    [message] = logged(caplog, OPENED, "last", ended, REASONED, TEXT, called, WITHIN, ONE)
    assert message.startswith("2 of 6 rows have an answer without '</think>' (the first: sample 'within'), but the")
    assert "begins each prompt's answer with '<think>'" in message
