"""File and line of errors in users' code, whose expected values are counted in the code below."""

from __future__ import annotations

import asyncio
import json
import runpy
from pathlib import Path
from typing import Any

import pytest

from rlframework.environments import threads
from rlframework.environments.user_tracebacks import described, place_of, traceback_of

CODE = """\
import json, sys

def looks_up(row):
    return row["prompt"]

def reads(row):
    return json.loads("{")

async def wraps(row):
    try:
        looks_up(row)
    except KeyError as error:
        raise ValueError("no task") from error

def leaves(row):
    sys.exit(3)

async def interrupts(row):
    raise KeyboardInterrupt
"""


@pytest.fixture
def raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`raised(name)`: the error of the function `name` of `mine.py` in the current folder, called as agents are."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "mine.py"
    path.write_text(CODE)
    names = runpy.run_path(str(path))

    async def call(name: str) -> BaseException:
        task = asyncio.ensure_future(threads.call(names[name], {}))
        await asyncio.wait({task})
        error = task.exception()
        assert error is not None
        return error

    def run(name: str) -> BaseException:
        return asyncio.run(call(name))

    return run


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("looks_up", "KeyError in the agent: 'prompt' (mine.py:4)"),
        ("reads", "(mine.py:7)"),  # not the line of the json package
        ("wraps", "ValueError in the agent: no task (mine.py:13)"),
        ("leaves", "RuntimeError in the agent: it called sys.exit(3) (mine.py:16)"),
        ("interrupts", "RuntimeError in the agent: it raised KeyboardInterrupt, which is no Exception:  (mine.py:19)"),
    ],
)
def test_the_place_is_the_users_line(raised: Any, name: str, says: str) -> None:
    assert described(raised(name), "the agent").endswith(says)


def test_the_traceback_begins_with_the_users_code(raised: Any) -> None:
    lines = traceback_of(raised("reads")).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert 'mine.py", line 7, in reads' in lines[1]
    assert json.__file__ in "\n".join(lines)
    assert lines[-1].startswith("json.decoder.JSONDecodeError: ")
    chained = traceback_of(raised("wraps"))
    assert chained.index("KeyError: 'prompt'") < chained.index("ValueError: no task")
    assert "rlframework/environments" not in chained


def test_an_error_without_the_users_frames() -> None:
    assert (place_of(ValueError("never raised")), traceback_of(ValueError("never raised"))) == ("", "")
    assert described(ValueError("x"), "the agent") == "ValueError in the agent: x"
