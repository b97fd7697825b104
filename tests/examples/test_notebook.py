"""The notebook runs, and its cells are those of the page "In a notebook"."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import rlframework

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "notebook" / "by_hand.ipynb"
KERNEL = """
import ast, asyncio, json, sys

async def run_cells():  # as in a kernel, an event loop is running
    for cell in json.loads(sys.argv[1]):
        *lines, last = ast.parse(cell).body
        exec(compile(ast.Module(lines, []), "cell", "exec"), globals())
        if isinstance(last, ast.Expr):
            print(repr(eval(compile(ast.Expression(last.value), "cell", "eval"), globals())))
        else:
            exec(compile(ast.Module([last], []), "cell", "exec"), globals())

asyncio.run(run_cells())
print(session)
try:
    sample(0)
except Exception as error:
    print(type(error).__name__)
"""
"""Runs cells in a `__main__` without a file, and prints the value of a last line, as a notebook does."""


def cells() -> list[str]:
    """The code cells of the notebook."""
    found = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def test_the_page_shows_the_notebook() -> None:
    page = (ROOT / "docs" / "notebook.md").read_text(encoding="utf-8")
    shown = re.findall(r"^```python\n(.*?)\n```$", page, re.MULTILINE | re.DOTALL)
    assert shown == cells()
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in notebook["cells"])


def test_the_calls_in_the_text_of_the_page_have_keywords_that_exist() -> None:
    """The cells run; what the text between them says, such as `complete(..., temperature=0)`, does not."""
    page = (ROOT / "docs" / "notebook.md").read_text(encoding="utf-8")
    names: dict[str, object] = dict(vars(rlframework))
    for line in re.findall(r"^from rlframework\S* import .+$", page, re.MULTILINE):
        exec(line, names)  # noqa: S102 - a line of our page
    checked = []
    for text in re.findall(r"`([a-z_.]+\([^`]*=[^`]*\))`", re.sub(r"```.*?```", "", page, flags=re.DOTALL)):
        call = ast.parse(text, mode="eval").body
        assert isinstance(call, ast.Call)
        function: Any = eval(ast.unparse(call.func), names)  # noqa: S307 - a name of our page
        given = {keyword.arg for keyword in call.keywords}
        assert given <= {*inspect.signature(function).parameters}, text
        checked.append(text)
    assert "complete(..., temperature=0)" in checked


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    """Sampling, a loss of the notebook in two processes, a reward that rises, and a session that is closed at last."""
    done = subprocess.run(
        [sys.executable, "-c", KERNEL, json.dumps(cells())],
        cwd=tmp_path,
        env=os.environ | {"MPLBACKEND": "agg", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "<Session of tiny: dtensor, 2 x processes, open>"
    assert len(re.findall(r"'[abc=]*'", lines[1])) == 4
    before, after = map(float, re.findall(r"0\.\d+|1\.0+", next(line for line in lines if "mean reward" in line)))
    assert before < 0.35
    assert after > 0.6
    assert lines[-2:] == ["<Session of tiny: dtensor, 2 x processes, closed>", "WorkerError"]
    assert (tmp_path / "trained" / "model.safetensors").is_file()
