"""Errors in a notebook: frames of the user's code, the message and its causes."""

from __future__ import annotations

import linecache

import pytest

from rlframework import load_config
from rlframework.base import errors
from rlframework.base.notebook_tracebacks import without_library_frames

OURS = errors.__file__


@pytest.fixture
def shown_of(monkeypatch):
    """`shown_of(cell, **names)`: the lines that IPython shows of the error of a cell."""

    def show(cell, **names):
        monkeypatch.setitem(linecache.cache, "/cells/1.py", (len(cell), None, cell.splitlines(True), "/cells/1.py"))
        try:
            exec(compile(cell, "/cells/1.py", "exec"), names)  # noqa: S102
        except (errors.RLFrameworkError, errors.RunInterrupted) as error:
            lines = error._render_traceback_()
            return lines[lines.index('  File "/cells/1.py", line 1, in <module>') :]  # the test is the user's code, too
        raise AssertionError("the cell raised nothing")

    return show


def test_an_error_shows_the_line_of_the_cell_and_its_message(shown_of):
    _, source, *carets, message, how = shown_of("load_config({'policy': 3})", load_config=load_config)
    assert source.strip() == "load_config({'policy': 3})"
    assert not "".join(carets).strip("^ ")
    assert message.startswith("ConfigError: ")
    assert how == "(only frames of your own code are shown; all: import traceback; traceback.print_last())"


def test_of_a_worker_the_frames_of_the_users_code_are_shown():
    kept = ['  File "/cells/2.py", line 15, in __call__', "    x = 1 / 0", "        ~~^~~", "ZeroDivisionError: oh"]
    ours = [f'  File "{OURS}", line 3, in train', "    loss_fn(", "            ^^^"]
    plugins = ['  File "/site/rlframework_dtensor/engine.py", line 9, in step', "    forward()"]
    library = [f'  File "{pytest.__file__}", line 9, in step']
    head = ["rank 0 of 2 failed in train: ZeroDivisionError: oh", "", "Traceback (most recent call last):"]
    assert without_library_frames("\n".join([*head, *ours, *plugins, *library, *kept])) == "\n".join([*head, *kept])


def test_causes_and_notes_follow(shown_of):
    error = errors.BatchError("too wide")
    error.add_note("raised by rank 1 of 2 in train")
    error.__cause__ = errors.WorkerError("rank 1 failed")
    lines = shown_of("raise error", error=error)
    assert lines[-4:-1] == ["BatchError: too wide", "caused by WorkerError: rank 1 failed", *error.__notes__]
    interrupted = errors.RunInterrupted(2, "resume('runs/a')", "runs/a/checkpoints/step-1")
    assert "To resume: resume('runs/a')" in shown_of("raise error", error=interrupted)[-2]
