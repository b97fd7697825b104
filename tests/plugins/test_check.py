"""The configuration against what a backend declares: each key, its capability, and the message."""

from __future__ import annotations

import pytest

from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import (
    AlgorithmConfig,
    CheckpointsConfig,
    EnvironmentConfig,
    RunConfig,
    WorkerGroupConfig,
)
from rlframework.errors import PluginError
from rlframework.plugins.check import check_config
from rlframework.plugins.manager import Registered
from rlframework.plugins.types import Capability, EnvironmentRecord, PolicyWorkerRecord, Problem

CASES = [
    ({"parallelism": {"tensor": 2}}, 2, "policy.parallelism.tensor", Capability.TENSOR_PARALLEL),
    ({"parallelism": {"context": 2}}, 2, "policy.parallelism.context", Capability.CONTEXT_PARALLEL),
    ({"parallelism": {"pipeline": 2}}, 2, "policy.parallelism.pipeline", Capability.PIPELINE_PARALLEL),
    ({"parallelism": {"expert": 2}}, 1, "policy.parallelism.expert", Capability.EXPERT_PARALLEL),
    ({"parallelism": {"sequence": True}}, 1, "policy.parallelism.sequence", Capability.SEQUENCE_PARALLEL),
    ({}, 2, "worker_group.num_workers", Capability.DATA_PARALLEL),
    ({"batching": {"mode": "dynamic"}}, 1, "policy.batching.mode", Capability.DYNAMIC_BATCHING),
    ({"batching": {"mode": "packed"}}, 1, "policy.batching.mode", Capability.PACKING),
    ({"precision": "bfloat16"}, 1, "policy.precision", Capability.BFLOAT16),
    ({"precision": "float16"}, 1, "policy.precision", Capability.FLOAT16),
    (
        {"activation_checkpointing": True},
        1,
        "policy.activation_checkpointing",
        Capability.ACTIVATION_CHECKPOINTING,
    ),
    ({"offload": {"parameters": True}}, 1, "policy.offload.parameters", Capability.CPU_OFFLOAD),
    ({"offload": {"optimizer": True}}, 1, "policy.offload.optimizer", Capability.CPU_OFFLOAD),
    ({"lora": {"rank": 4}}, 1, "policy.lora", Capability.LORA),
]


def run_config(policy=None, workers=1) -> RunConfig:
    return RunConfig(
        algorithm=AlgorithmConfig(name="a"),
        policy=PolicyConfig.model_validate({"model_name": "m", **(policy or {})}),
        environment=EnvironmentConfig(name="e"),
        worker_group=WorkerGroupConfig(num_workers=workers),
    )


def backend(*capabilities, check=None) -> Registered:
    record = PolicyWorkerRecord("acme", "m:C", 1, capabilities=frozenset(capabilities), check=check)
    return Registered(record, "acme-engine", "2.0", "acme")


@pytest.mark.parametrize(("policy", "workers", "key", "capability"), CASES)
def test_what_is_not_declared_is_a_problem_and_what_is_declared_is_not(policy, workers, key, capability):
    config = run_config(policy, workers)
    [problem] = check_config(config, backend(*set(Capability) - {capability}), "cpu")
    assert problem.key == key
    assert f"the backend 'acme' (acme-engine 2.0) does not declare {capability}." in problem.message
    assert "choose a backend that declares it" in problem.hint
    assert check_config(config, backend(capability), "cpu") == []


def test_every_capability_of_the_configuration_has_a_case():
    of_calls = {
        Capability.REFERENCE_MODEL,
        Capability.SCORING,
        Capability.EMBEDDED_GENERATION,
        Capability.LEARNED_POSITIONS,
        Capability.COLLECTIVE_REFIT,
        Capability.IPC_REFIT,
        Capability.PORTABLE_OPTIMIZER_STATE,
        Capability.SHARDED_CHECKPOINTS,
        Capability.NATIVE_CHECKPOINTS,
    }
    assert {case[3] for case in CASES} | of_calls == set(Capability)


def test_checkpoints_need_a_backend_that_saves_its_optimizer():
    config = run_config({}, 1).model_copy(update={"checkpoints": CheckpointsConfig(every=5)})
    [problem] = check_config(config, backend(), "cpu")
    assert problem.key == "checkpoints.every"
    assert problem.undeclared
    assert check_config(config, backend(Capability.PORTABLE_OPTIMIZER_STATE), "cpu") == []


@pytest.mark.parametrize("form", ["sharded", "native"])
def test_forms_of_checkpoints_that_take_more_need_a_backend_that_declares_them(form):
    config = run_config({}, 1).model_copy(update={"checkpoints": CheckpointsConfig(format=form)})
    [problem] = check_config(config, backend(), "cpu")
    assert problem.key == "checkpoints.format"
    assert problem.undeclared
    assert check_config(config, backend(Capability(f"{form}_checkpoints")), "cpu") == []


@pytest.mark.parametrize("mode", ["auto", "padded"])
def test_the_plain_configuration_needs_nothing(mode):
    assert check_config(run_config({"batching": {"mode": mode}}), backend(), "cpu") == []


def test_workers_of_one_replica_are_not_data_parallel():
    config = run_config({"parallelism": {"tensor": 2, "pipeline": 2}}, workers=4)
    capable = backend(Capability.TENSOR_PARALLEL, Capability.PIPELINE_PARALLEL)
    assert check_config(config, capable, "cpu") == []
    [problem] = check_config(run_config({"parallelism": {"tensor": 2}}, workers=4), capable, "cpu")
    assert problem.key == "worker_group.num_workers"


def test_the_plugins_own_check_comes_after_the_capabilities():
    asked = []

    def check(config, device):
        asked.append((config, device))
        return [Problem("policy.acme.speed", "too fast.", "Slow down.")]

    config = run_config({"lora": {}})
    problems = check_config(config, backend(check=check), "cuda")
    assert [problem.key for problem in problems] == ["policy.lora", "policy.acme.speed"]
    assert asked == [(config, "cuda")]


def test_other_kinds_are_only_asked_themselves():
    def check(config, device):
        return [Problem("environment.size", "too big")]

    record = EnvironmentRecord("maze", "m:C", 1, check=check)
    problems = check_config(run_config({"lora": {}}, 2), Registered(record, "maze-tasks", "1.0", "maze"), "cpu")
    assert [problem.key for problem in problems] == ["environment.size"]


def test_a_check_that_fails_blames_its_plugin():
    def raises(config, device):
        raise KeyError("speed")

    with pytest.raises(PluginError, match=r"check of the policy_worker 'acme' \(acme-engine 2.0\) failed: KeyError"):
        check_config(run_config(), backend(check=raises), "cpu")
    with pytest.raises(PluginError, match="must return a list of Problem, but it contains 'too fast'"):
        check_config(run_config(), backend(check=lambda config, device: ["too fast"]), "cpu")
