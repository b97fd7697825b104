"""Conversations as ids, with and without a chat template."""

from __future__ import annotations

from typing import Any

import pytest

from rlframework.datasets.rendering import render_completion, render_prompt
from rlframework.errors import DataError
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import Message, Sample

ALPHABET = "0123456789+= \nabcdefghijklmnopqrstuvwxyz"
TEMPLATE = (
    "{% for m in messages %}{{ '<start>' + m['role'] + '\n' + m['content'] + '<end>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start>assistant\n' }}{% endif %}"
)


def plain(**options: Any) -> Any:
    return character_tokenizer(ALPHABET, **options)


def chat(template: str = TEMPLATE) -> Any:
    tokenizer = plain()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<start>", "<end>"]})
    tokenizer.chat_template = template
    return tokenizer


def sample(completion: str, *contents: str) -> Sample:
    roles = ["system", "user"] if len(contents) == 2 else ["user"]
    turns: tuple[Message, ...] = tuple(
        {"role": role, "content": content} for role, content in zip(roles, contents, strict=True)
    )
    return Sample("s", turns, completion, completion)


def test_without_a_template() -> None:
    tokenizer = plain()
    task = sample("3", "add ", "1+2=")
    assert render_prompt(tokenizer, task.messages) == tokenizer("add 1+2=")["input_ids"]
    assert render_completion(tokenizer, task) == [*tokenizer("3")["input_ids"], tokenizer.eos_token_id]


def test_the_begin_token_is_put_where_the_tokenizer_puts_it() -> None:
    tokenizer = plain(bos=True)
    ids = render_prompt(tokenizer, sample("3", "1+2=").messages)
    assert ids == tokenizer("1+2=")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in render_completion(tokenizer, sample("3", "1+2="))
    silent = plain()
    silent.bos_token = silent.eos_token  # as GPT-2: there is one, but it is not put before texts
    assert render_prompt(silent, sample("3", "1+2=").messages) == silent("1+2=")["input_ids"]


def test_with_a_template() -> None:
    """The completion goes on where the prompt stops, up to and with the template's end of turn, without the newline."""
    tokenizer = chat()
    task = sample("three", "add", "1+2=")
    text = "<start>system\nadd<end>\n<start>user\n1+2=<end>\n<start>assistant\n"
    assert tokenizer.decode(render_prompt(tokenizer, task.messages)) == text
    completion = render_completion(tokenizer, task)
    assert tokenizer.decode(completion) == "three<end>"
    whole = tokenizer(text + "three<end>\n", add_special_tokens=False)["input_ids"]
    assert whole[:-1] == render_prompt(tokenizer, task.messages) + completion


def test_a_template_that_strips_the_answer() -> None:
    tokenizer = chat(TEMPLATE.replace("m['content']", "m['content'] | trim"))
    assert tokenizer.decode(render_completion(tokenizer, sample(" 3 ", "1+2="))) == " 3 <end>"


def test_a_template_that_writes_answers_in_another_way() -> None:
    """The generation prompt is not part of the template's conversation, but its end of turn is the same."""
    tokenizer = chat(TEMPLATE.replace("<start>assistant\n' }}{% endif", "<start>assistant\nthink ' }}{% endif"))
    assert tokenizer.decode(render_completion(tokenizer, sample("3", "1+2="))) == "3<end>"


def test_a_template_without_an_end() -> None:
    tokenizer = chat("{% for m in messages %}{{ m['content'] + '\n' }}{% endfor %}")
    completion = render_completion(tokenizer, sample("3", "1+2="))
    assert completion == [*tokenizer("3")["input_ids"], tokenizer.eos_token_id]


def test_a_template_that_refuses_a_role() -> None:
    refusal = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + TEMPLATE
    with pytest.raises(
        DataError, match=r"rejects .* \['system', 'user'\]: no system role.*remove environment.system_prompt"
    ):
        render_prompt(chat(refusal), sample("3", "add", "1+2=").messages)


def test_characters_without_a_token() -> None:
    with pytest.raises(DataError, match=r"no token for \['\?', 'X'\] in '1\+X\?'"):
        render_prompt(plain(), sample("3", "1+X?").messages)


def test_half_a_character() -> None:
    with pytest.raises(DataError, match=r"a lone surrogate \(\\ud83d\)"):
        render_prompt(plain(), sample("3", "1+\ud83d").messages)


def test_empty_prompts() -> None:
    with pytest.raises(DataError, match="has no token; give at least one message"):
        render_prompt(plain(), sample("3", "").messages)
    with pytest.raises(DataError, match="has no token"):
        render_prompt(plain(), [])


def test_no_end_token() -> None:
    tokenizer = plain()
    tokenizer.eos_token = None
    with pytest.raises(DataError, match="has no end-of-sequence token"):
        render_completion(tokenizer, sample("3", "1+2="))
