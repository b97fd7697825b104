"""Conversations as ids, with and without a chat template."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlframework.datasets.collate import pad_rendered, pad_rows
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


def test_rows_are_padded_on_the_right() -> None:
    ids, lengths = pad_rows([[1, 2, 3], [4], []], 9)
    assert ids.tolist() == [[1, 2, 3], [4, 9, 9], [9, 9, 9]]
    assert lengths.tolist() == [3, 1, 0]
    assert ids.dtype == lengths.dtype == torch.int64


def test_masks_go_with_them() -> None:
    rows = pad_rendered([([1, 2, 3], [False, True, True]), ([4], [True])], 0)
    assert rows.input_ids.tolist() == [[1, 2, 3], [4, 0, 0]]
    assert rows.input_lengths.tolist() == [3, 1]
    assert rows.token_mask.tolist() == [[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]


def test_no_rows() -> None:
    with pytest.raises(DataError, match="cannot make a batch of no rows"):
        pad_rows([], 0)
