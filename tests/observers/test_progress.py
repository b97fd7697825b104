"""Lines that tell how far a command has come."""

from __future__ import annotations

import io

import pytest

from rlframework.observers.progress import Lines, counting


def test_a_line_comes_after_each_interval_with_the_time_that_is_left() -> None:
    now = 100.0
    stream = io.StringIO()
    tell = Lines("rows", stream, every=30.0, clock=lambda: now)
    for now, done in ((110.0, 100), (130.0, 250), (140.0, 300), (190.0, 900), (225.0, 1000)):  # noqa: B007 - the clock reads it
        tell(done, 1000)
    # 250 in 30 s: 750 more take 90 s; 900 in 90 s: 100 more take 10 s
    assert stream.getvalue() == "rows: 250 of 1,000, 90 s left\nrows: 900 of 1,000, 10 s left\nrows: 1,000 of 1,000\n"


def test_nothing_done_yet_has_no_time_left() -> None:
    now = 0.0
    stream = io.StringIO()
    tell = Lines("rows", stream, every=1.0, clock=lambda: now)
    now = 5.0
    tell(0, 10)
    assert stream.getvalue() == "rows: 0 of 10\n"


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with counting("rows") as progress:
        progress(1, 2)
    assert capsys.readouterr() == ("", "")
