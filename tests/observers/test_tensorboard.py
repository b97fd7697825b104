"""The event file holds each metric under its name."""

import warnings

import pytest

from rlframework.observers.tensorboard import TensorBoardObserver
from rlframework.plugins.hookspec import RunInfo


def test_scalars_are_in_the_event_file(tmp_path):
    observer = TensorBoardObserver()
    observer.rlframework_run_started(RunInfo(None, tmp_path))
    observer.rlframework_step_finished(1, {"train/loss": 0.5, "train/reward": 0.25})
    observer.rlframework_step_finished(2, {"train/loss": 0.125})
    observer.close()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the reader, which is not ours
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 0.5), (2, 0.125)]
    assert [(event.step, event.value) for event in events.Scalars("train/reward")] == [(1, pytest.approx(0.25))]


def test_close_without_a_start_is_harmless():
    TensorBoardObserver().close()
