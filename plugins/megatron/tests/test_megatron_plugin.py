"""The record of the megatron backend and its check, without torch."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from pydantic import ValidationError, create_model

from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import AlgorithmConfig, EnvironmentConfig, RunConfig
from rlframework.plugins.check import check_config
from rlframework.plugins.manager import create_manager
from rlframework_megatron import config as megatron_config
from rlframework_megatron.config import MegatronConfig

PolicyWithMegatron = create_model(
    "PolicyWithMegatron", __base__=PolicyConfig, megatron=(MegatronConfig, MegatronConfig())
)
LLAMA = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
}
MIXTURE = LLAMA | {"model_type": "qwen3_moe", "num_experts": 4}


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.delenv("RLFRAMEWORK_DISABLE_PLUGINS", raising=False)
    return create_manager(["rlframework_megatron.plugin"]).select("policy_worker", "megatron")


@pytest.fixture
def problems_of(registered, tmp_path):
    """`problems_of(model, workers, **policy)`: problems of a configuration, as keys and messages."""

    def problems(model=LLAMA, workers=1, **policy):
        (tmp_path / "config.json").write_text(json.dumps(model))
        config = RunConfig(
            algorithm=AlgorithmConfig(name="a"),
            worker_group={"num_workers": workers},
            policy=PolicyWithMegatron.model_validate({"model_name": str(tmp_path), "backend": "megatron", **policy}),
            environment=EnvironmentConfig(name="e"),
        )
        return [(problem.key, problem.message) for problem in check_config(config, registered, "cpu")]

    return problems


def test_the_record_names_the_worker_and_the_section(registered):
    assert registered.record.target == "rlframework_megatron.worker:MegatronPolicyWorker"
    assert registered.record.config_model is MegatronConfig
    assert registered.record.api_version == 1


@pytest.mark.slow
def test_the_plugin_imports_neither_torch_nor_megatron():
    found = "import sys, rlframework_megatron.plugin; print({'torch', 'megatron'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", found], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_supported_configurations_have_no_problems(problems_of):
    assert problems_of() == []
    assert problems_of(workers=4, parallelism={"tensor": 2, "pipeline": 2, "sequence": True}) == []
    assert problems_of(workers=2, parallelism={"pipeline": 2}, megatron={"virtual_pipeline": 2}) == []
    overlapped = {"distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    assert problems_of(workers=2, megatron=overlapped, precision="bfloat16") == []
    assert problems_of(MIXTURE, workers=2, parallelism={"expert": 2}, router_aux_loss_coef=0.1) == []


@pytest.mark.parametrize(
    ("model", "workers", "policy", "key", "says"),
    [
        (LLAMA, 4, {"parallelism": {"tensor": 4}}, "policy.parallelism.tensor", "2 key-value heads"),
        (LLAMA, 3, {"parallelism": {"pipeline": 3}}, "policy.parallelism.pipeline", "4 layers"),
        (
            LLAMA,
            2,
            {"parallelism": {"pipeline": 2}, "megatron": {"virtual_pipeline": 3}},
            "policy.megatron.virtual_pipeline",
            "2 stages of 3 model chunks",
        ),
        (LLAMA, 1, {"megatron": {"virtual_pipeline": 2}}, "policy.megatron.virtual_pipeline", "need a pipeline"),
        (LLAMA, 1, {"parallelism": {"sequence": True}}, "policy.parallelism.sequence", "requires tensor parallelism"),
        (LLAMA, 2, {"parallelism": {"expert": 2}}, "policy.parallelism.expert", "no experts"),
        (LLAMA, 1, {"router_aux_loss_coef": 0.1}, "policy.router_aux_loss_coef", "no experts"),
        (MIXTURE | {"num_experts": 3}, 2, {"parallelism": {"expert": 2}}, "policy.parallelism.expert", "3 experts"),
        (MIXTURE, 3, {"parallelism": {"expert": 2}}, "policy.parallelism.expert", "3 data-parallel workers"),
        (MIXTURE, 2, {"parallelism": {"tensor": 2}}, "policy.parallelism.sequence", "mixtures of experts"),
        (
            LLAMA,
            2,
            {"megatron": {"overlap_param_gather": True}},
            "policy.megatron.overlap_param_gather",
            "distributed_optimizer",
        ),
        (LLAMA | {"model_type": "gpt2"}, 1, {}, "policy.model_name", "cannot convert 'gpt2'"),
    ],
)
def test_unsupported_configurations_are_reported_before_a_process_starts(
    problems_of, model, workers, policy, key, says
):
    found = problems_of(model, workers, **policy)
    assert [at for at, _ in found] == [key]
    assert says in found[0][1]


def test_unknown_keys_of_the_section_are_rejected():
    with pytest.raises(ValidationError, match="distributed_optimiser"):
        MegatronConfig.model_validate({"distributed_optimiser": True})


# -- defaults on a GPU -------------------------------------------------------------------------------------------------

SHARDED = ("distributed_optimizer", "overlap_grad_reduce", "overlap_param_gather")
FUSED = ("fused_activation", "fused_gradient_accumulation")


@pytest.fixture
def defaults(monkeypatch):
    """`defaults(workers, parallelism, packages, **section)`: the keys that a GPU sets to true."""

    def found(workers=1, parallelism=None, packages=(), **section):
        monkeypatch.setattr(megatron_config, "find_spec", lambda name: object() if name in packages else None)
        monkeypatch.setattr(megatron_config, "which", lambda name: f"/usr/bin/{name}" if name in packages else None)
        policy = {"model_name": "m", "backend": "megatron", "parallelism": parallelism or {}, "megatron": section}
        config = RunConfig(
            algorithm=AlgorithmConfig(name="a"),
            worker_group={"num_workers": workers},
            policy=PolicyWithMegatron.model_validate(policy),
            environment=EnvironmentConfig(name="e"),
        )
        assert megatron_config.device_defaults(config, "cpu") == []
        given = megatron_config.device_defaults(config, "cuda")
        assert all(default.value is True and default.reason for default in given)
        return tuple(default.key.removeprefix("policy.megatron.") for default in given)

    return found


def test_replicas_on_gpus_shard_the_optimizer_and_overlap_communication(defaults):
    assert defaults() == defaults(4, {"tensor": 2, "pipeline": 2}) == ()
    assert defaults(2) == defaults(4, {"tensor": 2, "context": 2}) == SHARDED
    assert defaults(2, distributed_optimizer=False) == defaults(2, overlap_grad_reduce=False) == SHARDED[:2]


def test_kernels_are_fused_where_their_packages_are_installed(defaults):
    assert defaults(packages=("triton",)) == defaults(packages=("gcc",)) == ()
    assert defaults(packages=("triton", "gcc", megatron_config.GRADIENT_KERNELS)) == FUSED


@pytest.mark.parametrize("key", FUSED)
def test_a_fusion_without_its_packages_is_a_problem_on_a_gpu(monkeypatch, key):
    monkeypatch.setattr(megatron_config, "find_spec", lambda name: None)
    config = RunConfig(
        algorithm=AlgorithmConfig(name="a"),
        policy=PolicyWithMegatron(model_name="m", backend="megatron", megatron={key: True}),
        environment=EnvironmentConfig(name="e"),
    )
    assert megatron_config.check(config, "cpu") == []
    assert [problem.key for problem in megatron_config.check(config, "cuda")] == [f"policy.megatron.{key}"]
