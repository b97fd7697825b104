"""Learning rates and parameter groups, computed by hand; freed memory returns to the system at a limited rate."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from rlframework.base.errors import ConfigError
from rlframework.config.policy import OptimizerConfig, SchedulerConfig
from rlframework.policy.optimization import learning_rate, parameter_groups, resolve_total_steps
from rlframework.policy.training_step import MallocTrimmer


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"warmup_steps": 4}, [0.0, 0.25, 0.5, 0.75, 1.0, 1.0]),
        ({"name": "linear", "total_steps": 4, "min_ratio": 0.2}, [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        ({"name": "cosine", "total_steps": 6, "warmup_steps": 2}, [0.0, 0.5, 1.0, 0.8535534, 0.5, 0.1464466, 0.0]),
    ],
)
def test_schedules(config, expected):
    rates = [learning_rate(1.0, SchedulerConfig(**config), step) for step in range(len(expected))]
    assert rates == pytest.approx(expected)


def test_total_steps_come_from_the_run():
    assert resolve_total_steps(SchedulerConfig(name="linear"), 50).total_steps == 50
    assert resolve_total_steps(SchedulerConfig(name="linear", total_steps=7), 50).total_steps == 7
    with pytest.raises(ConfigError, match=r"warmup_steps is 50.*after 50 steps"):
        resolve_total_steps(SchedulerConfig(name="cosine", warmup_steps=50), 50)


def test_one_dimensional_parameters_do_not_decay():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    named = [*model.named_parameters(), ("frozen", frozen)]
    decayed, kept = parameter_groups(named, OptimizerConfig(weight_decay=0.1))
    assert [tuple(parameter.shape) for parameter in decayed["params"]] == [(2, 3)]
    assert decayed["weight_decay"] == 0.1
    assert [tuple(parameter.shape) for parameter in kept["params"]] == [(2,), (2,), (2,)]
    assert kept["weight_decay"] == 0.0


def _resident_mb() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can trim its heap")
def test_freed_memory_leaves_the_process() -> None:
    trimmer = MallocTrimmer(min_interval=0.0)
    blocks = [bytearray(100_000) for _ in range(2000)]  # below the size from which the C library maps each alone
    kept = blocks[::50]  # the trimmer cannot shrink from its end
    del blocks
    before = _resident_mb()
    assert trimmer.trim()
    assert before - _resident_mb() > 100
    assert len(kept) == 40


@pytest.mark.skipif(sys.platform != "linux", reason="only glibc can trim its heap")
def test_trims_are_at_least_an_interval_apart() -> None:
    times = iter((0.0, 1.0, 10.0, 15.0, 19.9, 20.0))
    trimmer = MallocTrimmer(clock=lambda: next(times), min_interval=10.0)
    assert [trimmer.trim() for _ in range(5)] == [False, True, False, False, True]
