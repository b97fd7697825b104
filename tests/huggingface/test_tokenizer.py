"""Tokenizers and chat templates: the character tokenizer, loading, and the small models made of it."""

from __future__ import annotations

import logging
import os
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from rlframework.base.errors import ConfigError, DataError
from rlframework.huggingface import hub
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import (
    character_tokenizer,
    check_chat_template,
    load_tokenizer,
    read_chat_template,
    tokenizer_fingerprint,
)

ALPHABET = "0123456789+-= \n.aé漢"
TOKENIZER = character_tokenizer(ALPHABET)


def test_text_is_the_same_after_tokens_and_files(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    text = "1 + 2\n= 漢é"
    for tokenizer in (TOKENIZER, load_tokenizer(str(tmp_path))):
        ids = tokenizer(text)["input_ids"]
        assert ids == [2 + ALPHABET.index(character) for character in text]
        assert tokenizer.decode(ids) == tokenizer.decode([*ids, 1, 0], skip_special_tokens=True) == text
        assert (tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id) == (0, 1, None)
        assert len(tokenizer) == 2 + len(ALPHABET)
    character_tokenizer("ab", bos=True).save_pretrained(tmp_path)
    for tokenizer in (character_tokenizer("ab", bos=True), load_tokenizer(str(tmp_path))):
        assert tokenizer("ba")["input_ids"] == [2, 4, 3]
        assert tokenizer("ba", add_special_tokens=False)["input_ids"] == [4, 3]


@pytest.mark.parametrize("alphabet", ["", "aa", ["ab"], [""]])
def test_bad_alphabets(alphabet: Any) -> None:
    with pytest.raises(DataError, match="must be one or more distinct single characters"):
        character_tokenizer(alphabet)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("nowhere", r".*policy\.model_name"), ("described", "lacks the tokenizer's files"), ("empty", "")],
)
def test_a_folder_without_a_tokenizer_is_told(tmp_path: Path, name: str, problem: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "described").mkdir()
    (tmp_path / "described" / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 100}')
    with pytest.raises(DataError, match=rf"no tokenizer can be loaded from .*{name}.*{problem}"):
        load_tokenizer(str(tmp_path / name))


@pytest.fixture
def lookups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool, bool]]:
    """Every look-up fails; name, whether it stayed local, and whether the hub's client would warn of retries."""
    from transformers import AutoTokenizer

    seen = []

    def fail(name: str, *, trust_remote_code: bool, local_files_only: bool) -> None:
        seen.append((name, local_files_only, logging.getLogger("huggingface_hub").isEnabledFor(logging.WARNING)))
        raise OSError("not there")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "probe_hub", lambda: None)
    return seen


@pytest.mark.parametrize(
    ("name", "asked"),
    [
        *((path, False) for path in ("./model", "../m", "/no/such/model", "~/m", "runs/sft/model", "there/model")),
        ("gpt2", True),
        ("nobody/no-such-model", True),
    ],
)
def test_the_hub_is_asked_for_what_does_not_look_like_a_path(
    lookups: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    name: str,
    asked: bool,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    before = logging.getLogger("huggingface_hub").getEffectiveLevel()
    with pytest.raises(DataError, match="the hub cannot be reached" if asked else "there is no such model directory"):
        load_tokenizer(name)
    assert lookups == [(name, not asked, False)]
    assert logging.getLogger("huggingface_hub").getEffectiveLevel() == before
    assert caplog.messages == [f"there is no directory {name!r} here: asking the Hugging Face hub for it"] * asked


def test_pad_falls_back_to_the_end_token(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("ab")
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path / "no_pad")
    assert load_tokenizer(str(tmp_path / "no_pad")).pad_token_id == 1
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path / "no_end")
    with pytest.raises(DataError, match="has no end-of-sequence token"):
        load_tokenizer(str(tmp_path / "no_end"))


def test_a_fingerprint_is_that_of_what_ids_depend_on(tmp_path: Path) -> None:
    """It survives saving, copying and the settings of calls; each change of ids gives another."""
    tokenizer = character_tokenizer("abc")
    print_of = tokenizer_fingerprint(tokenizer)
    tokenizer.save_pretrained(tmp_path / "saved")
    assert tokenizer_fingerprint(load_tokenizer(str(tmp_path / "saved"))) == print_of
    assert tokenizer_fingerprint(pickle.loads(pickle.dumps(tokenizer))) == print_of  # noqa: S301
    tokenizer(["a", "abc"], padding=True, truncation=True, max_length=2)
    assert tokenizer_fingerprint(tokenizer) == print_of
    others = [character_tokenizer("acb"), character_tokenizer("abcd"), character_tokenizer("abc", bos=True)]
    others += [character_tokenizer("abc") for _ in range(3)]
    others[3].chat_template = "{{ messages }}"
    others[4].add_special_tokens({"additional_special_tokens": ["<end>"]})
    others[5].eos_token = "a"
    prints = [tokenizer_fingerprint(other) for other in others]
    assert len({print_of, *prints}) == 7


def test_a_chat_template_of_your_own(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path / "t")
    text = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "own.jinja").write_text(text, encoding="utf-8")
    for template in (text, str(tmp_path / "own.jinja")):
        assert load_tokenizer(str(tmp_path / "t"), chat_template=template).chat_template == text


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer.json", '{"model": {"type": "WordLevel", "vocab": {"a": -1}, "unk_token": 3}}'),
        ("tokenizer_config.json", "[]"),
        ("tokenizer_config.json", '{"tokenizer_class": 5}'),
        ("tokenizer_config.json", '{"chat_template": 5, "eos_token": "a"}'),
    ],
)
def test_files_that_are_no_tokenizer(tmp_path: Path, file: str, text: str) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    (tmp_path / file).write_text(text)
    with pytest.raises(DataError, match=re.escape(str(tmp_path))):
        load_tokenizer(str(tmp_path))


def test_make_llama(tmp_path: Path) -> None:
    """A directory that transformers reads; equal for equal seeds; the process's own random numbers are left alone."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    paths = [
        make_llama(tmp_path / name, TOKENIZER, hidden=16, layers=2, heads=4, kv_heads=2, seed=seed)
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert torch.equal(torch.rand(3), expected)
    models = [AutoModelForCausalLM.from_pretrained(path) for path in paths]
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["lm_head.weight"], states[2]["lm_head.weight"])
    config = models[0].config
    assert (config.vocab_size, config.num_key_value_heads, config.eos_token_id) == (len(TOKENIZER), 2, 1)
    assert load_tokenizer(str(paths[0]))("1+1")["input_ids"] == TOKENIZER("1+1")["input_ids"]
    with pytest.raises(ConfigError, match=r"hidden \(16\) must be a multiple of heads \(3\)"):
        make_llama(tmp_path / "m", TOKENIZER, hidden=16, heads=3)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


@pytest.mark.slow
def test_a_template_with_the_tags_of_transformers(tmp_path: Path) -> None:
    text = "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert read_chat_template(text) == text
    check_chat_template(text, "here")
    # some accept no second user turn, or need a system turn: real conversations show whether they fit
    check_chat_template("{{ raise_exception('no') }}{{ messages[9].content }}", "here")


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("chatml", r"policy\.chat_template: 'chatml' cannot be read \(No such file"),
        ("a\0b", "cannot be read .*null"),
        ("latin", "is not UTF-8 text"),
        ("pipe", "it is not a file"),
    ],
)
def test_a_file_that_is_no_text_is_told(tmp_path: Path, monkeypatch, name: str, problem: str) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "latin").write_bytes(b"\xe9")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match=problem):
        read_chat_template(name)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{{ messages }}\n{% for %}", "here: not a valid Jinja template, line 2: "),
        ("{{ 1 }}" + "{% if 1 %}" * 300, "here: not a valid Jinja template"),
        ("{{ 'x' * 10**11 }}", "takes more than 1024 MiB"),
        ("{% set n = namespace(s='x' * 1000) %}{% for i in range(99) %}{% set n.s = n.s * 9 %}{% endfor %}", "MiB"),
    ],
)
def test_what_is_no_usable_template(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_chat_template(text, "here")


@pytest.mark.slow
def test_a_template_that_does_not_end(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    monkeypatch.setattr("rlframework.huggingface.tokenizer._PATIENCE", 2.0)
    with pytest.raises(DataError, match="here: rendering a short conversation takes more than 5 s"):
        check_chat_template(loop, "here")
