"""Checks of a configuration: against what its parts declare, by the parts themselves, and those that backends share."""

from __future__ import annotations

import json

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
from rlframework.plugins.model_checks import head_size, indivisible, lora_problems, model_config, token_cache_bytes
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


@pytest.mark.parametrize(
    ("changes", "key", "capability"),
    [
        ({"environment": EnvironmentConfig(name="e", images=ImagesConfig())}, "environment.images", "multimodal"),
        (
            {
                "policy": PolicyConfig.model_validate({"model_name": "m", "lora": {"refit": "adapters"}}),
                "generation": GenerationConfig(workers=GenerationWorkersConfig()),
            },
            "policy.lora.refit",
            "lora_refit",
        ),
    ],
    ids=["images", "adapters"],
)
def test_an_engine_must_declare_what_it_is_sent(changes, key, capability):
    def problems(config, *declared):
        capabilities = frozenset({Capability.IPC_REFIT, *map(Capability, declared)})
        engine = Registered(GenerationEngineRecord("fast", "m:C", 2, capabilities=capabilities), "fast", "1.0", "fast")
        return [problem.key for problem in check_config(config, engine, "cpu")]

    config = run_config().model_copy(update=changes)
    assert (problems(run_config()), problems(config), problems(config, capability)) == ([], [key], [])


def test_workers_of_one_replica_are_not_data_parallel():
    config = run_config({"parallelism": {"tensor": 2, "pipeline": 2}}, workers=4)
    capable = backend(Capability.TENSOR_PARALLEL, Capability.PIPELINE_PARALLEL)
    assert check_config(config, capable, "cpu") == []
    [problem] = check_config(run_config({"parallelism": {"tensor": 2}}, workers=4), capable, "cpu")
    assert problem.key == "worker_group.num_workers"


def test_the_own_check_of_a_plugin_comes_after_the_capabilities():
    asked = []

    def check(config, device):
        asked.append((config, device))
        return [Problem("policy.acme.speed", "too fast.", "Slow down.")]

    config = run_config({"lora": {}}, 2)
    problems = check_config(config, backend(Capability.DATA_PARALLEL, check=check), "cuda")
    assert [problem.key for problem in problems] == ["policy.lora", "policy.acme.speed"]
    environment = Registered(EnvironmentRecord("maze", "m:C", 1, check=check), "maze-tasks", "1.0", "maze")
    assert [problem.key for problem in check_config(config, environment, "cuda")] == ["policy.acme.speed"]
    assert asked == [(config, "cuda")] * 2


def test_a_check_that_fails_blames_its_plugin():
    def raises(config, device):
        raise KeyError("speed")

    with pytest.raises(PluginError, match=r"check of the policy_worker 'acme' \(acme-engine 2.0\) failed: KeyError"):
        check_config(run_config(), backend(check=raises), "cpu")
    with pytest.raises(PluginError, match="must return a list of Problem, but it contains 'too fast'"):
        check_config(run_config(), backend(check=lambda config, device: ["too fast"]), "cpu")


LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("model", "tensor", "said"),
    [
        (LLAMA, 2, None),
        (LLAMA, 4, "the model has 2 key-value heads, not divisible by policy.parallelism.tensor=4"),
        (LLAMA | {"intermediate_size": 63}, 2, "the model has 63 units of the MLP"),
        (LLAMA | {"num_attention_heads": 5}, 2, "the model has 5 attention heads"),
        ({}, 3, None),
    ],
)
def test_what_tensor_parallelism_does_not_divide(model, tensor, said):
    found = indivisible(model, tensor)
    assert (found is None) == (said is None)
    assert said is None or (found is not None and found.startswith(said))


def test_the_cache_of_a_token_has_keys_and_values_of_each_head_and_layer():
    model = {"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 32}
    assert (head_size(model), token_cache_bytes(model, 4)) == (8, 2 * 3 * 2 * 8 * 4)
    assert token_cache_bytes({**model, "head_dim": 5, "num_key_value_heads": None}, 2) == 2 * 3 * 4 * 5 * 2
    assert (head_size({}), token_cache_bytes({}, 4)) == (0, 0)


@pytest.mark.parametrize(("text", "found"), [(json.dumps(LLAMA), LLAMA), ("[]", {}), ("{", {}), (None, {})])
def test_the_configuration_of_a_model_directory(tmp_path, text, found):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    assert model_config(str(tmp_path)) == found


@pytest.mark.parametrize(
    ("policy", "key"),
    [
        ({}, None),
        ({"lora": {}}, None),
        ({"lora": {"target_modules": []}}, "policy.lora.target_modules"),
        ({"lora": {}, "head": "score"}, "policy.lora"),
        ({"lora": {}, "head": "value"}, "policy.lora"),
    ],
)
def test_what_adapters_do_not_go_with(policy, key):
    config = RunConfig(
        algorithm=AlgorithmConfig(name="a"),
        policy=PolicyConfig.model_validate({"model_name": "m", **policy}),
        environment=EnvironmentConfig(name="e"),
    )
    assert [problem.key for problem in lora_problems(config)] == [key] * (key is not None)
