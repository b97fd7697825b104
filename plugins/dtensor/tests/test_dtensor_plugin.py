"""The record of the dtensor backend and its check, without torch."""

from __future__ import annotations

import subprocess
import sys

import pytest
from pydantic import ValidationError, create_model

from rlframework.config.policy import PolicyConfig
from rlframework.config.sections import AlgorithmConfig, EnvironmentConfig, RunConfig
from rlframework.plugins.check import check_config
from rlframework.plugins.manager import create_manager
from rlframework_dtensor import config as dtensor_config
from rlframework_dtensor import plugin
from rlframework_dtensor.config import DTensorConfig

PolicyWithDTensor = create_model("PolicyWithDTensor", __base__=PolicyConfig, dtensor=(DTensorConfig, DTensorConfig()))


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.delenv("RLFRAMEWORK_DISABLE_PLUGINS", raising=False)
    return create_manager(["rlframework_dtensor.plugin"]).select("policy_worker", "dtensor")


def problems_of(registered, device="cpu", **policy):
    config = RunConfig(
        algorithm=AlgorithmConfig(name="a"),
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


def test_float16_is_refused(registered):
    [(key, message)] = problems_of(registered, precision="float16")
    assert key == "policy.precision"
    assert "does not declare float16" in message


def test_flash_attention_on_a_cpu_is_refused(registered):
    problems = problems_of(registered, precision="bfloat16", dtensor={"attention": "flash_attention_2"})
    assert problems == [("policy.dtensor.attention", "flash_attention_2 needs a GPU, and the device is cpu.")]


@pytest.mark.parametrize("installed", [True, False])
def test_flash_attention_needs_its_package_and_half_precision(registered, monkeypatch, installed):
    monkeypatch.setattr(dtensor_config, "find_spec", lambda name: object() if installed else None)
    choice = {"attention": "flash_attention_2"}
    missing = [("policy.dtensor.attention", "flash_attention_2 needs the package flash-attn.")]
    wrong = [("policy.dtensor.attention", "flash_attention_2 does not compute in float32.")]
    assert problems_of(registered, "cuda", precision="bfloat16", dtensor=choice) == ([] if installed else missing)
    assert problems_of(registered, "cuda", dtensor=choice) == ([] if installed else missing) + wrong


def test_unknown_keys_of_the_section_are_refused():
    with pytest.raises(ValidationError, match="reshard"):
        DTensorConfig(reshard=True)


def test_the_plugin_imports_no_torch():
    code = f"import sys, {plugin.__name__} as p; p.rlframework_policy_workers(); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
