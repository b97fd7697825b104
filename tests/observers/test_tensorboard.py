"""The event file holds each metric under its name."""

import warnings

import pytest

from rlframework.observers.tensorboard import TensorBoardObserver
from rlframework.plugins.hookspec import RunInfo


def read(path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the reader, which is not ours
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    return EventAccumulator(str(path / "tensorboard")).Reload()


def test_scalars_are_in_the_event_file(tmp_path):
    observer = TensorBoardObserver()
    observer.rlframework_run_started(RunInfo(None, tmp_path))
    observer.rlframework_step_finished(1, {"train/loss": 0.5, "train/reward": 0.25})
    observer.rlframework_step_finished(2, {"train/loss": 0.125})
    observer.close()
    events = read(tmp_path)
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.125)]
    assert [(event.step, event.value) for event in events.Scalars("train/reward")] == [(1, pytest.approx(0.25))]


def test_a_resumed_run_replaces_repeated_steps(tmp_path):
    for steps, value in (((1, 2, 3, 4), 0.5), ((3, 4, 5), 0.25)):
        observer = TensorBoardObserver()
        observer.rlframework_run_started(RunInfo(None, tmp_path))
        for step in steps:
            observer.rlframework_step_finished(step, {"train/loss": value})
        observer.close()
    seen = [(event.step, event.value) for event in read(tmp_path).Scalars("train/loss")]
    assert seen == [(1, 0.5), (2, 0.5), (3, 0.25), (4, 0.25), (5, 0.25)]


def test_close_without_a_start_is_harmless():
    TensorBoardObserver().close()
