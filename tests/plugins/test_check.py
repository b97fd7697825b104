"""The configuration against what a backend declares: each key, its capability, and the message."""

from __future__ import annotations

import pytest

from rlframework.base.errors import PluginError
from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import (
    AlgorithmConfig,
    EnvironmentConfig,
    GenerationConfig,
    GenerationWorkersConfig,
    ImagesConfig,
    RunConfig,
    WorkerGroupConfig,
)
from rlframework.plugins.check import check_config
from rlframework.plugins.manager import Registered
from rlframework.plugins.types import Capability, EnvironmentRecord, GenerationEngineRecord, PolicyWorkerRecord, Problem

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
    ({"activation_checkpointing": True}, 1, "policy.activation_checkpointing", Capability.ACTIVATION_CHECKPOINTING),
    ({"offload": {"parameters": True}}, 1, "policy.offload.parameters", Capability.CPU_OFFLOAD),
    ({"offload": {"optimizer": True}}, 1, "policy.offload.optimizer", Capability.CPU_OFFLOAD),
    ({"optimizer": {"name": "muon"}}, 1, "policy.optimizer.name", Capability.MUON),
    ({"lora": {"rank": 4}}, 1, "policy.lora", Capability.LORA),
    ({"freeze": "vision"}, 1, "policy.freeze", Capability.MULTIMODAL),
    ({"head": "score"}, 1, "policy.head", Capability.SCORING),
    ({"head": "value"}, 1, "policy.head", Capability.SCORING),
    ({"checkpoints": {"every": 5}}, 1, "checkpoints.every", Capability.PORTABLE_OPTIMIZER_STATE),
    ({"checkpoints": {"format": "sharded"}}, 1, "checkpoints.format", Capability.SHARDED_CHECKPOINTS),
    ({"checkpoints": {"format": "native"}}, 1, "checkpoints.format", Capability.NATIVE_CHECKPOINTS),
]


def run_config(policy=None, workers=1) -> RunConfig:
    policy = dict(policy or {})
    return RunConfig(
        checkpoints=policy.pop("checkpoints", {}),
        algorithm=AlgorithmConfig(name="a"),
        policy=PolicyConfig.model_validate({"model_name": "m", **policy}),
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
    assert (problem.key, problem.undeclared) == (key, True)
    assert f"the backend 'acme' (acme-engine 2.0) does not declare {capability}." in problem.message
    assert "choose a backend that declares it" in problem.hint
    assert check_config(config, backend(capability), "cpu") == []


def test_every_capability_of_the_configuration_has_a_case():
    of_calls = {"reference_model", "embedded_generation", "learned_positions", "collective_refit", "ipc_refit"}
    of_calls |= {"lora_refit", "in_flight_update", "episodes"}
    assert {str(case[3]) for case in CASES} | of_calls == set(Capability)


@pytest.mark.parametrize("mode", ["auto", "padded"])
def test_the_plain_configuration_needs_nothing(mode):
    assert check_config(run_config({"batching": {"mode": mode}}), backend(), "cpu") == []


def test_images_are_for_engines_that_declare_them():
    config = run_config({})
    images = config.environment.model_copy(update={"images": ImagesConfig()})
    for declared in (False, True):
        capabilities = frozenset({Capability.MULTIMODAL} if declared else ())
        engine = Registered(GenerationEngineRecord("fast", "m:C", 2, capabilities=capabilities), "fast", "1.0", "fast")
        assert check_config(config, engine, "cpu") == []
        problems = check_config(config.model_copy(update={"environment": images}), engine, "cpu")
        assert [problem.key for problem in problems] == ([] if declared else ["environment.images"])


def test_adapters_alone_are_sent_only_to_engines_that_declare_it():
    config = run_config({"lora": {"refit": "adapters"}}).model_copy(
        update={"generation": GenerationConfig(workers=GenerationWorkersConfig())}
    )
    for declared in (False, True):
        capabilities = frozenset({Capability.IPC_REFIT, *([Capability.LORA_REFIT] if declared else [])})
        engine = Registered(GenerationEngineRecord("fast", "m:C", 2, capabilities=capabilities), "fast", "1.0", "fast")
        problems = check_config(config, engine, "cpu")
        assert [problem.key for problem in problems] == ([] if declared else ["policy.lora.refit"])
    assert check_config(config, backend(Capability.LORA), "cpu") == []


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
