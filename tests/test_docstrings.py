"""The wording of docstrings that a program can check."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("rlframework", "plugins", "examples", "benchmarks", "tests", "docs/tools")


def docstrings(path: Path) -> list[tuple[int, str]]:
    """The line and text of each docstring of the module at `path`, of attributes too."""
    strings = [
        node.value
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    ]
    return [(string.lineno, str(string.value).strip()) for string in strings]


def test_no_docstring_begins_with_what() -> None:
    """A docstring says what the thing is or does; "What ..." circles around it."""
    files = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py") if ".venv" not in path.parts]
    assert len(files) > 400
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for path in files
        if "What" in path.read_text(encoding="utf-8")  # parsing all of them takes seconds
        for line, text in docstrings(path)
        if text.split(" ", 1)[0].rstrip(".,:") == "What"
    ]
    assert not wrong, "\n".join(wrong)


def test_a_docstring_that_begins_with_what_is_found(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text('"""A module."""\n\nX = 1\n"""What X is."""\n\n\ndef f():\n    """What f does."""\n')
    assert docstrings(path) == [(1, "A module."), (4, "What X is."), (8, "What f does.")]
