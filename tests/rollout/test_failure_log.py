"""Thousands of failed groups of a step are four lines of the log."""

from __future__ import annotations

import pytest

from rlframework.rollout.tickets import FailureLog


def test_the_first_failures_of_a_step_are_logged_and_the_others_counted(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for number in range(4000):
        log.add(7, f"ticket {number} failed")
    log.add(8, "ticket 4000 failed")
    log.end(7)
    log.end(8)
    shown = ["ticket 0 failed", "ticket 1 failed", "ticket 2 failed", "ticket 4000 failed"]
    assert caplog.messages == [*shown, "step 7: 4000 groups failed; 3997 are not shown"]


def test_a_step_begins_anew_after_its_end(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for _ in range(2):
        for number in range(3):
            log.add(1, str(number))
        log.end(1)
    assert caplog.messages == ["0", "1", "2"] * 2
