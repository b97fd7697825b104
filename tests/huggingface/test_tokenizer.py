"""The character tokenizer, loading, and the small models made of it."""

from __future__ import annotations

import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import modeling_utils

from rlframework.base.errors import ConfigError, DataError
from rlframework.huggingface import hub
from rlframework.huggingface.model_directories import make_llama
from rlframework.huggingface.tokenizer import character_tokenizer, load_tokenizer, tokenizer_fingerprint

ALPHABET = "0123456789+-= \n.aé漢"
TOKENIZER = character_tokenizer(ALPHABET)


@given(st.text(alphabet=ALPHABET))
def test_round_trip(text: str) -> None:
    ids = TOKENIZER(text)["input_ids"]
    assert ids == [2 + ALPHABET.index(character) for character in text]
    assert TOKENIZER.decode(ids) == text
    assert TOKENIZER.decode([*ids, 1, 0], skip_special_tokens=True) == text


def test_written_and_read(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    loaded = load_tokenizer(str(tmp_path))
    text = "1 + 2\n= 漢é"
    assert loaded(text)["input_ids"] == TOKENIZER(text)["input_ids"]
    assert loaded.decode(loaded(text)["input_ids"]) == text
    assert (loaded.pad_token_id, loaded.eos_token_id, loaded.bos_token_id) == (0, 1, None)
    assert len(loaded) == 2 + len(ALPHABET)


def test_begin_token(tmp_path: Path) -> None:
    tokenizer = character_tokenizer("ab", bos=True)
    tokenizer.save_pretrained(tmp_path)
    for each in (tokenizer, load_tokenizer(str(tmp_path))):
        assert each("ba")["input_ids"] == [2, 4, 3]
        assert each("ba", add_special_tokens=False)["input_ids"] == [4, 3]


@pytest.mark.parametrize("alphabet", ["", "aa", ["ab"], [""]])
def test_bad_alphabets(alphabet: Any) -> None:
    with pytest.raises(DataError, match="must be one or more distinct single characters"):
        character_tokenizer(alphabet)


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer can be loaded from .*nowhere.*policy\.model_name"):
        load_tokenizer(str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    (tmp_path / "described").mkdir()
    (tmp_path / "described" / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 100}')
    with pytest.raises(DataError, match=r"no tokenizer can be loaded from .*lacks the tokenizer's files"):
        load_tokenizer(str(tmp_path / "described"))
    with pytest.raises(DataError, match=r"no tokenizer can be loaded from .*empty"):
        load_tokenizer(str(tmp_path / "empty"))


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


@pytest.mark.parametrize("name", ["./model", "../m", "/no/such/model", "~/m", "runs/sft/model", "there/model"])
def test_what_looks_like_a_path_is_not_asked_of_the_hub(
    lookups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    with pytest.raises(DataError, match="there is no such model directory"):
        load_tokenizer(name)
    assert lookups == [(name, True, False)]
    assert not caplog.messages


@pytest.mark.parametrize("name", ["gpt2", "nobody/no-such-model"])
def test_the_hub_is_asked_with_one_line(
    lookups: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = logging.getLogger("huggingface_hub").getEffectiveLevel()
    with pytest.raises(DataError, match="the hub cannot be reached"):
        load_tokenizer(name)
    assert lookups == [(name, False, False)]
    assert logging.getLogger("huggingface_hub").getEffectiveLevel() == before
    assert caplog.messages == [f"there is no directory {name!r} here: asking the Hugging Face hub for it"]


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
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "c"]


def test_make_llama_with_heads_that_do_not_divide(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"hidden \(16\) must be a multiple of heads \(3\)"):
        make_llama(tmp_path / "m", TOKENIZER, hidden=16, heads=3)
    assert not (tmp_path / "m").exists()


def test_saving_a_model_does_not_ask_what_is_around_it(tmp_path, monkeypatch):
    """Accelerate would import all of DeepSpeed for the answer: seconds, and a line on standard output."""

    def ask(*args, **kwargs):
        pytest.fail("asked")

    monkeypatch.setattr(modeling_utils, "unwrap_model", ask)
    made = make_llama(tmp_path / "model", TOKENIZER, hidden=8, layers=1, heads=2)
    assert (made / "model.safetensors").exists()
    assert modeling_utils.unwrap_model is ask  # put back
