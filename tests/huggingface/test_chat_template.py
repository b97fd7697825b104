"""Chat templates that are files or text, that are not templates, and that do not end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rlframework.base.errors import DataError
from rlframework.huggingface.tokenizer import check_chat_template, read_chat_template


@pytest.mark.slow
def test_a_template_with_the_tags_of_transformers(tmp_path: Path) -> None:
    text = "{% for m in messages %}{%- generation -%}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
    assert read_chat_template(text) == text
    check_chat_template(text, "here")


def test_what_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"policy\.chat_template: 'chatml' cannot be read \(No such file"):
        read_chat_template("chatml")
    with pytest.raises(DataError, match=r"cannot be read .*null"):
        read_chat_template("a\0b")
    (tmp_path / "latin").write_bytes(b"\xe9")
    with pytest.raises(DataError, match="is not UTF-8 text"):
        read_chat_template(str(tmp_path / "latin"))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(DataError, match="it is not a file"):
        read_chat_template(str(tmp_path / "pipe"))


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


def test_a_template_may_reject_the_trial() -> None:
    """Some accept no second user turn, or need a system turn: real conversations show whether they fit."""
    check_chat_template("{{ raise_exception('no') }}{{ messages[9].content }}", "here")
