"""Every key of the configuration that a page names is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
FILES = (".json", ".yaml", ".md")


def named(text: str, keys: set[str]) -> set[str]:
    """The inline code of `text` that looks like a key; calls, paths and files do not."""
    sections = "|".join(sorted({key.partition(".")[0] for key in keys}))
    code = re.findall(r"`([^`\n]+)`", FENCED.sub("", text))
    key = re.compile(rf"(?<![\w./])((?:{sections})(?:\.[a-z_]+)+)(?![\w(/])")
    found = {word for piece in code for word in key.findall(piece)}
    return {word for word in found if not word.endswith(FILES)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(DOCS).as_posix())
def test_the_keys_that_a_page_names_are_there(page, keys):
    text = page.read_text(encoding="utf-8")
    if page.parent.name == "moving":  # the first column has other people's keys
        text = re.sub(r"^\| [^|]*\|", "|", text, flags=re.MULTILINE)
    assert named(text, keys) - keys == set()


def test_a_key_that_is_gone_is_found(keys):
    text = "`policy.optimiser.lr=1`, `policy.optimizer.lr`, `policy.train(batch)`, `a/policy/x.py`, `environment.json`"
    assert named(text, keys) - keys == {"policy.optimiser.lr"}
