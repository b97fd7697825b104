"""Progress lines of a command."""

from __future__ import annotations

import io

import pytest

from rlframework.observers.progress import ProgressLines, progress_bar


def test_a_line_with_the_remaining_time_is_printed_after_each_interval() -> None:
    now = 100.0
    stream = io.StringIO()
    tell = ProgressLines("rows", stream, every=30.0, clock=lambda: now)
    for now, done in ((110.0, 100), (130.0, 250), (140.0, 300), (190.0, 900), (225.0, 1000)):  # noqa: B007 - the clock reads it
        tell(done, 1000)
    # 250 in 30 s: 750 more take 90 s; 900 in 90 s: 100 more take 10 s
    assert stream.getvalue() == "rows: 250 of 1,000, 90 s left\nrows: 900 of 1,000, 10 s left\nrows: 1,000 of 1,000\n"


def test_no_remaining_time_before_any_progress() -> None:
    now = 0.0
    stream = io.StringIO()
    tell = ProgressLines("rows", stream, every=1.0, clock=lambda: now)
    now = 5.0
    tell(0, 10)
    assert stream.getvalue() == "rows: 0 of 10\n"


def test_without_a_terminal_there_is_no_bar(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("rows") as progress:
        progress(1, 2)
    assert capsys.readouterr() == ("", "")
