"""The deepspeed backend registers its name, and whoever chooses it hears plainly that it comes later."""

from __future__ import annotations

import pytest

from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import AlgorithmConfig, EnvironmentConfig, RunConfig
from rlframework.errors import NotSupported
from rlframework.plugins.check import check_config
from rlframework.plugins.manager import create_manager


@pytest.fixture
def manager(monkeypatch):
    monkeypatch.delenv("RLFRAMEWORK_DISABLE_PLUGINS", raising=False)
    return create_manager(["rlframework_deepspeed.plugin"])


def test_it_declares_nothing_and_says_so(manager):
    record = manager.select("policy_worker", "deepspeed").record
    assert record.capabilities == frozenset()
    assert "comes in a later release" in record.summary


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_choosing_it_fails_before_a_process_starts(manager, device):
    config = RunConfig(
        algorithm=AlgorithmConfig(name="a"),
        policy=PolicyConfig(model_name="m", backend="deepspeed"),
        environment=EnvironmentConfig(name="e"),
    )
    problems = check_config(config, manager.select("policy_worker", "deepspeed"), device)
    assert [(problem.key, problem.message, problem.hint) for problem in problems] == [
        (
            "policy.backend",
            "The deepspeed backend comes in a later release: this one only registers its name.",
            "Set policy.backend to dtensor.",
        )
    ]


@pytest.mark.parametrize("arguments", [{}, {"config": {}, "context": None}])
def test_making_its_worker_is_refused(manager, arguments):
    worker = manager.load(manager.select("policy_worker", "deepspeed").record)
    with pytest.raises(NotSupported, match="deepspeed backend comes in a later release"):
        worker(**arguments)
