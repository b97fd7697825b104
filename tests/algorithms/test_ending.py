"""How runs end: early stopping, and signals whose exception is raised in a `__del__`, where Python drops it."""

from __future__ import annotations

import logging
import math
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from probe_runs import numbers_of

from rlframework import run
from rlframework.algorithms.checkpoints import Checkpoints
from rlframework.algorithms.ending import EarlyStopping, ending_on_signals, raise_if_ended
from rlframework.algorithms.loop import StepLoop, Timer
from rlframework.base.errors import RunInterrupted, RunTerminated, WorkerLost
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


CODES = {signal.SIGTERM: 143, signal.SIGINT: 130}


class Signalled:
    """Gets a signal while it is deleted: its handler runs in `__del__`."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        signal.raise_signal(self.number)
        raise AssertionError("the handler has not run here")


@pytest.fixture
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[type[BaseException]]:
    """The kinds of exceptions that Python has dropped."""
    kinds: list[type[BaseException]] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda lost: kinds.append(lost.exc_type))
    return kinds


@pytest.mark.parametrize("number", CODES)
def test_a_lost_signal_ends_the_run_at_the_next_phase(number: signal.Signals, dropped: list[Any]) -> None:
    @ending_on_signals()
    def phases(begins: bool) -> None:
        if begins:
            Signalled(number)
        with Timer().phase("train"):
            if not begins:
                Signalled(number)
            reached.append("phase")
        reached.append("after it")

    for begins in (True, False):
        reached: list[str] = []
        with pytest.raises(RunTerminated) as caught:
            phases(begins)
        assert caught.value.exit_code == CODES[number]
        assert reached == ([] if begins else ["phase"])
    assert dropped == [RunTerminated] * 2
    raise_if_ended()  # the next run of this process is not ended


@pytest.mark.parametrize("error", [None, WorkerLost("gone"), KeyboardInterrupt()])
def test_a_signal_that_was_lost_counts_at_the_latest_at_the_end(error: BaseException | None, dropped: Any) -> None:
    @ending_on_signals()
    def end() -> None:
        Signalled(signal.SIGTERM)
        if error is not None:
            raise error

    before = [signal.getsignal(number) for number in CODES]
    with pytest.raises(RunTerminated) as caught:
        end()
    assert (caught.value.exit_code, caught.value.__cause__, len(dropped)) == (143, error, 1)
    assert [signal.getsignal(number) for number in CODES] == before


def test_without_a_signal_errors_are_as_they_are() -> None:
    for error in (WorkerLost("gone"), KeyboardInterrupt(), RunInterrupted(2, "resume", "checkpoint")):
        with pytest.raises(type(error)) as caught, ending_on_signals():
            raise error
        assert caught.value is error


def test_a_programs_own_handler_of_ctrl_c_is_kept() -> None:
    def own(*_: object) -> None:
        pass

    before = signal.signal(signal.SIGINT, own)
    try:
        with ending_on_signals():
            assert signal.getsignal(signal.SIGINT) is own
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_signal_ends_one_run_of_a_program_that_calls_the_algorithm_itself() -> None:
    checkpoints: Any = SimpleNamespace(_trained={}, _config=SimpleNamespace(on_interrupt=True), _stop=None)

    def training() -> None:
        with Checkpoints.handling_signals(checkpoints):
            for _ in range(2):
                signal.raise_signal(signal.SIGINT)

    with pytest.raises(RunTerminated):
        training()
    assert checkpoints._stop == signal.SIGINT
    raise_if_ended()  # the next run of this process is not ended
