"""The record of the dtensor backend and its check."""

from __future__ import annotations

import json

import pytest
from pydantic import ValidationError, create_model

from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import AlgorithmConfig, EnvironmentConfig, RunConfig
from rlframework.plugins import model_checks
from rlframework.plugins.check import check_config
from rlframework.plugins.manager import create_manager
from rlframework_dtensor import config as dtensor_config
from rlframework_dtensor.config import DTensorConfig

PolicyWithDTensor = create_model("PolicyWithDTensor", __base__=PolicyConfig, dtensor=(DTensorConfig, DTensorConfig()))


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.delenv("RLFRAMEWORK_DISABLE_PLUGINS", raising=False)
    return create_manager(["rlframework_dtensor.plugin"]).select("policy_worker", "dtensor")


def problems_of(registered, device="cpu", workers=1, **policy):
    config = RunConfig(
        algorithm=AlgorithmConfig(name="a"),
        worker_group={"num_workers": workers},
        policy=PolicyWithDTensor.model_validate({"model_name": "m", **policy}),
        environment=EnvironmentConfig(name="e"),
    )
    return [(problem.key, problem.message) for problem in check_config(config, registered, device)]


def test_the_record_names_the_worker_and_the_section(registered):
    assert registered.record.target == "rlframework_dtensor.worker:DTensorPolicyWorker"
    assert registered.record.config_model is DTensorConfig
    assert registered.record.api_version == 1


def test_the_plain_configuration_has_no_problems(registered):
    assert problems_of(registered) == []
    assert problems_of(registered, precision="bfloat16", activation_checkpointing=True) == []
    assert problems_of(registered, batching={"mode": "packed"}) == []
    assert problems_of(registered, parallelism={"context": 2}, dtensor={"attention": "sdpa"}) == []
    assert problems_of(registered, workers=2, **COMPILED) == []


COMPILED = {"device": "cuda", "dtensor": {"compile": True}}
FLASH, EAGER = ({"attention": name} for name in ("flash_attention_2", "eager"))
REJECTED = {
    "float16": ({"precision": "float16"}, "precision", "does not declare float16"),
    "flash on a CPU": ({"precision": "bfloat16", "dtensor": FLASH}, "dtensor.attention", "needs a GPU"),
    "eager over a context": (
        {"workers": 2, "parallelism": {"context": 2}, "dtensor": EAGER},
        "dtensor.attention",
        "has its own attention, and does not support eager",
    ),
    "compiled over tensor ranks": (
        COMPILED | {"workers": 2, "parallelism": {"tensor": 2}},
        "dtensor.compile",
        "cannot be combined with tensor parallelism",
    ),
    "compiled, selective": (
        COMPILED | {"activation_checkpointing": "selective"},
        "dtensor.compile",
        "activation checkpointing",
    ),
    "compiled, full": (COMPILED | {"activation_checkpointing": "full"}, "dtensor.compile", "activation checkpointing"),
    "sequence alone": ({"parallelism": {"sequence": True}}, "parallelism.sequence", "requires tensor parallelism"),
    "a plan alone": ({"dtensor": {"custom_parallel_plan": "module:plan"}}, "dtensor.custom_parallel_plan", ""),
}


@pytest.mark.parametrize(("settings", "key", "said"), REJECTED.values(), ids=REJECTED)
def test_a_setting_that_does_not_fit_is_named(registered, settings, key, said):
    [(named, message)] = problems_of(registered, **settings)
    assert named == f"policy.{key}"
    assert said in message


def test_compiling_on_a_cpu_without_a_compiler_is_rejected(registered, monkeypatch):
    monkeypatch.setattr(dtensor_config, "which", lambda name: None)
    [(key, message)] = problems_of(registered, dtensor={"compile": True})
    assert key == "policy.dtensor.compile"
    assert "needs a C++ compiler" in message
    assert problems_of(registered, device="cuda", dtensor={"compile": True}) == []


@pytest.mark.parametrize("installed", [True, False])
def test_flash_attention_needs_its_package_and_half_precision(registered, monkeypatch, installed):
    monkeypatch.setattr(model_checks, "find_spec", lambda name: object() if installed else None)
    choice = {"attention": "flash_attention_2"}
    missing = [("policy.dtensor.attention", "flash_attention_2 needs the package flash-attn.")]
    wrong = [("policy.dtensor.attention", "flash_attention_2 does not support float32.")]
    assert problems_of(registered, "cuda", precision="bfloat16", dtensor=choice) == ([] if installed else missing)
    assert problems_of(registered, "cuda", dtensor=choice) == ([] if installed else missing) + wrong


LLAMA = {"num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 64}


@pytest.mark.parametrize(
    ("model", "tensor", "said"),
    [
        (LLAMA, 2, None),
        (LLAMA, 4, "the model has 2 key-value heads, not divisible by policy.parallelism.tensor=4."),
        (LLAMA | {"intermediate_size": 63}, 2, "the model has 63 units of the MLP"),
        (LLAMA | {"num_attention_heads": 5}, 2, "the model has 5 attention heads"),
        ({}, 3, None),  # a name on the hub: checked by the workers
    ],
)
def test_heads_that_tensor_parallelism_does_not_divide_are_rejected(registered, tmp_path, model, tensor, said):
    if model:
        (tmp_path / "config.json").write_text(json.dumps(model))
    found = problems_of(registered, workers=tensor, model_name=str(tmp_path), parallelism={"tensor": tensor})
    assert [key for key, _ in found] == ["policy.parallelism.tensor"] * (said is not None)
    assert said is None or said in found[0][1]


@pytest.mark.parametrize(("replicate", "refused"), [(1, False), (2, False), (3, True), (4, False)])
def test_replicas_divide_the_data_parallel_workers(registered, replicate, refused):
    found = problems_of(registered, workers=4, dtensor={"replicate": replicate})
    assert [key for key, _ in found] == ["policy.dtensor.replicate"] * refused


def test_unknown_keys_of_the_section_are_rejected():
    with pytest.raises(ValidationError, match="reshard"):
        DTensorConfig(reshard=True)
