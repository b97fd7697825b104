"""Early stopping: when a run ends because a metric does not improve, and that a resumed run ends at the same step."""

from __future__ import annotations

import logging
import math
from typing import Any

import pytest
from probe_runs import numbers_of

from rlframework import run
from rlframework.algorithms.checkpoints import checkpoints_in
from rlframework.algorithms.ending import EarlyStopping
from rlframework.algorithms.loop import StepLoop
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


@pytest.mark.parametrize(
    ("values", "settings", "reason"),
    [
        ([0.2, 0.2125], {"min_change": 0.5, "patience": 1}, "by more than min_change=0.5, in 1 measurement ("),
        ([0.2, 0.1, 0.2], {"patience": 2}, "in 2 measurements ("),
    ],
)
def test_the_reason_of_the_end(values: Any, settings: Any, reason: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        ends_at(values, **settings)
    assert f"the run ends, because m has not improved on 0.2, that of step 1, {reason}" in caplog.text


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


def test_a_misspelled_metric_is_told_at_the_first_validation_and_at_the_end(
    run_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """The first validation is that of step 0."""
    stopping = "algorithm.early_stopping={metric: validation/acuracy, patience: 1}"
    keep = "checkpoints={every: 1, keep_best: 1, metric: validation/accurcy}"
    config = run_config("sft", "algorithm.num_steps=3", "algorithm.validation.every=1", stopping, keep)
    told_first: list[str] = []

    def validate_and_note(loop: Any, step: int) -> Any:
        if step == 1:
            told_first.extend(record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
        return validation(loop, step)

    with pytest.MonkeyPatch.context() as patch:
        validation = StepLoop.validate
        patch.setattr(StepLoop, "validate", validate_and_note)
        run(config)
    of_stopping, of_best = (message for message in told_first if "has nothing to compare" in message)
    assert "no metric 'validation/acuracy'; there are validation/accuracy" in of_stopping
    assert "no metric checkpoints.metric='validation/accurcy'; there are validation/accuracy" in of_best
    assert caplog.text.count("has nothing to compare") == 2
    assert "compared nothing: no step of this run has measured 'validation/acuracy'" in caplog.text


def test_the_checkpoint_of_the_best_step_is_kept(run_config: Any, caplog: pytest.LogCaptureFixture) -> None:
    """The metric falls with each step, so that the first one is the best; checkpoints of later steps would replace it.

    The step that the end names is that of the best checkpoint.
    """
    keep = "checkpoints={every: 1, keep_last: 1, keep_best: 1}"
    early = "algorithm.early_stopping={metric: train/lr, patience: 2}"
    schedule = "policy.scheduler={name: linear, warmup_steps: 0}"
    config = run_config("sft", "algorithm.num_steps=6", early, keep, schedule)
    with caplog.at_level(logging.INFO):
        run(config)
    assert [path.name for path in checkpoints_in(config.output_dir)] == ["step-000001", "step-000003"]
    assert "train/lr has not improved on 0.001, that of step 1," in caplog.text
    assert f"best checkpoint: {config.output_dir / 'checkpoints' / 'step-000001'}, with train/lr" in caplog.text


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
    caplog.clear()
    assert resume(config.output_dir, [f"output_dir={config.output_dir}"]).metrics["step"] == 3
    (ended,) = (record.getMessage() for record in caplog.records if "nothing is left to do" in record.getMessage())
    assert "algorithm.early_stopping ended this run at step 3 of 6" in ended
    assert ended.endswith(f"rlframework train --resume {config.output_dir} '~algorithm.early_stopping'")
    assert resume(config.output_dir, ["~algorithm.early_stopping"]).metrics["step"] == 6
