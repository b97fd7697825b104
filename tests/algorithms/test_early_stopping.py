"""Early stopping: when a run ends because a metric does not improve, and that a resumed run ends at the same step."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from probe_runs import numbers_of

from rlframework import run
from rlframework.algorithms.early_stopping import EarlyStopping
from rlframework.config.sections import EarlyStoppingConfig
from rlframework.runner.launch import resume


def ends_at(values: list[float], **settings: Any) -> int | None:
    """Return the number of values, from 1, after which a run with these settings ends."""
    stopping = EarlyStopping(EarlyStoppingConfig(metric="m", **settings))
    return next((number for number, value in enumerate(values, 1) if stopping.update(number, {"m": value})), None)


def test_a_run_ends_after_as_many_measurements_without_an_improvement() -> None:
    assert ends_at([0.1, 0.2, 0.2, 0.1, 0.3, 0.3, 0.2, 0.3], patience=3) == 8
    assert ends_at([0.1, 0.2, 0.2, 0.1, 0.3, 0.3], patience=3) is None
    assert ends_at([3.0, 2.0, 2.5, 2.0], best="lowest", patience=2) == 4
    assert ends_at([0.1, 0.14, 0.18, 0.22], min_change=0.1, patience=2) == 3
    assert ends_at([math.nan, math.nan], patience=2) == 2


def test_steps_without_a_measurement_do_not_count_and_without_a_setting_nothing_does() -> None:
    stopping = EarlyStopping(EarlyStoppingConfig(metric="m", patience=1))
    assert [stopping.update(step, each) for step, each in enumerate(({"m": 1.0}, {}, {}, {"m": 1.0}))][-2:] == [
        False,
        True,
    ]
    assert not EarlyStopping(None).update(1, {"m": 0.0})


def test_a_metric_that_is_not_measured_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    stopping = EarlyStopping(EarlyStoppingConfig(metric="validation/acuracy"))
    for step in range(3):
        stopping.update(step, {"validation/accuracy": 0.5, "train/loss": 1.0})
    (record,) = caplog.records
    assert "no metric 'validation/acuracy'; there are validation/accuracy" in record.getMessage()


@pytest.mark.slow
def test_a_resumed_run_ends_where_the_whole_one_does(run_config: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The metric falls with each step, so that the second measurement after the first ends the run."""
    early = "algorithm.early_stopping={metric: train/lr, patience: 2}"
    keys = ("algorithm.num_steps=6", "checkpoints.every=1", "checkpoints.keep_last=9", early)
    schedule = "policy.scheduler={name: linear, warmup_steps: 0}"
    config = run_config("sft", *keys, schedule)
    with caplog.at_level(logging.INFO):
        assert run(config).metrics["step"] == 3
    assert "the run ends, because train/lr has not improved on 0.001, that of step 1, in 2" in caplog.text
    assert list(numbers_of(config.output_dir))[-1] == 3
    assert resume(config.output_dir, [f"output_dir={config.output_dir}"]).metrics["step"] == 3
