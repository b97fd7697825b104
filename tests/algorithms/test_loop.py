"""The loop of steps, around parts that do nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframework import RunResult
from rlframework.algorithms import loop
from rlframework.algorithms.loop import StepLoop, require_step_result


def test_the_start_of_an_engine_is_not_part_of_the_validation(monkeypatch):
    times = iter((100.0, 112.0))
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: next(times)))
    generation = SimpleNamespace(pop_metrics=lambda: {"time/refit": 2.0, "time/engine_start": 7.0})
    made: Any = SimpleNamespace(
        timeline=None, parts=SimpleNamespace(generation=generation), validate=lambda step: ({}, [])
    )
    metrics, _ = StepLoop._timed_validation(made, 0)
    assert metrics == {"time/validation": 5.0, "validation/refit_seconds": 2.0, "time/engine_start": 7.0}


@pytest.mark.parametrize(("step", "told"), [(4, True), (3, False)])
def test_resuming_a_finished_run_says_what_to_raise(monkeypatch, caplog, step, told):
    monkeypatch.setattr(loop, "restore_random_states", lambda states: None)
    config = SimpleNamespace(resume_with="rlframework train --resume runs/a {}".format)
    restored = SimpleNamespace(step=step, random=None, metrics={})
    resumed: Any = SimpleNamespace(
        _restored=restored,
        config=SimpleNamespace(num_steps=4),
        early_stopping=SimpleNamespace(ended=False),
        parts=SimpleNamespace(config=config),
    )
    assert StepLoop._begin(resumed) == {"step": step}
    assert ("raise algorithm.num_steps" in caplog.text) == told
    assert ("rlframework train --resume runs/a algorithm.num_steps=8" in caplog.text) == told


def test_metrics_of_a_loss_replace_none_of_the_frameworks_own(caplog):
    made: Any = SimpleNamespace(_warned_metrics=set())
    own = {"train/loss": 1.0, "train/lr": 0.5}
    of_loss = {"lr": 9.0, "reward": 9.0, "tokens": 9.0, "clip_fraction": 0.25}
    for _ in range(2):
        merged = StepLoop.with_loss_metrics(made, own, of_loss, taken=["train/reward"])
        assert merged == {**own, "train/clip_fraction": 0.25}
    [told] = [record.message for record in caplog.records]
    assert "its metrics lr, reward, tokens" in told
    merged = StepLoop.with_loss_metrics(made, own, {"reward": 9.0})
    assert merged == {**own, "train/reward": 9.0}  # where no rollout has one


@pytest.mark.parametrize(
    ("result", "described"),
    [
        (None, "returned a NoneType"),
        ({"train/loss": 1.0}, "returned a dict"),
        (({"train/loss": 1.0},), "returned a tuple of dict"),
        (({"train/loss": torch.tensor(1.0)}, []), "returned the metric 'train/loss' as a Tensor"),
    ],
)
def test_a_step_with_a_wrong_result_says_what_it_must_return(result, described):
    with pytest.raises(TypeError, match=rf"^Mine.train_step {described}; it must return \(metrics, samples\)"):
        require_step_result(result, "Mine")
    assert require_step_result(({"train/loss": 1}, []), "Mine") == ({"train/loss": 1}, [])


def test_a_result_is_shown_in_one_short_line() -> None:
    metrics = {"train/loss": 0.123456, "step": 20.0, "train/lr": 1e-3}
    assert repr(RunResult(metrics, [metrics] * 21)) == (
        "<RunResult: train/loss: 0.1235, step: 20; 3 metrics, history of 21 rows>"
    )
