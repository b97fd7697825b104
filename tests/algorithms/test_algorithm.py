"""The result of a run."""

from __future__ import annotations

from rlframework import RunResult


def test_a_result_is_shown_in_one_short_line() -> None:
    metrics = {"train/loss": 0.123456, "step": 20.0, "train/lr": 1e-3}
    assert repr(RunResult(metrics, [metrics] * 21)) == (
        "<RunResult: train/loss: 0.1235, step: 20; 3 metrics, history of 21 rows>"
    )
