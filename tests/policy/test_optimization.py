"""Learning rates, computed by hand."""

from __future__ import annotations

import pytest

from rlframework.config.policy import OptimizerConfig, SchedulerConfig
from rlframework.errors import ConfigError
from rlframework.policy.optimization import learning_rate, parameter_groups, resolve_total_steps


def rates(config: SchedulerConfig, steps: int) -> list[float]:
    return [learning_rate(1.0, config, step) for step in range(steps)]


def test_constant_with_warmup():
    assert rates(SchedulerConfig(warmup_steps=4), 6) == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0, 1.0])


def test_linear_decays_to_the_ratio_and_stays():
    config = SchedulerConfig(name="linear", total_steps=4, min_ratio=0.2)
    assert rates(config, 6) == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2, 0.2])


def test_cosine_is_half_way_in_the_middle():
    config = SchedulerConfig(name="cosine", total_steps=6, warmup_steps=2)
    assert rates(config, 7) == pytest.approx([0.5, 1.0, 1.0, 0.8535534, 0.5, 0.1464466, 0.0])


def test_total_steps_come_from_the_run():
    assert resolve_total_steps(SchedulerConfig(name="linear"), 50).total_steps == 50
    assert resolve_total_steps(SchedulerConfig(name="linear", total_steps=7), 50).total_steps == 7


def test_a_warmup_longer_than_the_run_is_an_error():
    with pytest.raises(ConfigError, match=r"warmup_steps is 50.*after 50 steps"):
        resolve_total_steps(SchedulerConfig(name="cosine", warmup_steps=50), 50)


def test_one_dimensional_parameters_do_not_decay():
    import torch

    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.LayerNorm(2))
    model[0].weight.requires_grad_(True)
    frozen = torch.nn.Parameter(torch.ones(2, 2), requires_grad=False)
    named = [*model.named_parameters(), ("frozen", frozen)]
    decayed, kept = parameter_groups(named, OptimizerConfig(weight_decay=0.1))
    assert [tuple(parameter.shape) for parameter in decayed["params"]] == [(2, 3)]
    assert decayed["weight_decay"] == 0.1
    assert [tuple(parameter.shape) for parameter in kept["params"]] == [(2,), (2,), (2,)]
    assert kept["weight_decay"] == 0.0
