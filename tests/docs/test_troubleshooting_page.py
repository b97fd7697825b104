"""docs/troubleshooting.md: every message that it quotes is still in the source."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = re.findall(r"^```text\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)
GAP = "…"


@cache
def literals() -> tuple[str, ...]:
    """All texts of the sources; what an f-string fills in is a gap."""
    files = [*(ROOT / "rlframework").rglob("*.py"), *(ROOT / "plugins").glob("*/rlframework_*/**/*.py")]
    return tuple(text for path in files for text in _texts(ast.parse(path.read_text(encoding="utf-8"))))


def _texts(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (str(part.value) if isinstance(part, ast.Constant) else GAP for part in node.values)
            found.append("".join(parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append(node.value)
    return found


def missing(message: str) -> list[str]:
    """The pieces of `message` between its gaps that no text of the sources has."""
    pieces = [piece.strip(" `'\"():;,.") for piece in message.removeprefix("error: ").split(GAP)]
    long = [piece for piece in pieces if len(piece) >= 8]
    assert long, f"{message!r} has nothing to look for"
    return [piece for piece in long if not any(piece in text for text in literals())]


@pytest.mark.slow
@pytest.mark.parametrize("message", MESSAGES, ids=[message[:50] for message in MESSAGES])
def test_the_message_is_in_the_source(message):
    assert missing(message) == []


def test_a_message_that_changed_is_found():
    assert missing("this run is not what anybody ever said, … and never will be") != []
    assert len(MESSAGES) > 40
