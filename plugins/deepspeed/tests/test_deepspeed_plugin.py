"""The record of the deepspeed backend, and that choosing and checking it imports neither torch nor deepspeed."""

from __future__ import annotations

import subprocess
import sys

import pytest

from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import Capability
from rlframework_deepspeed.config import DeepSpeedConfig

LIGHT = """
import sys
from rlframework.config.sections import RunConfig
from rlframework.plugins.configure import load_config
from rlframework.plugins.manager import create_manager
manager = create_manager(["rlframework_deepspeed.plugin"])
parts = {"algorithm": {"name": "sft"}, "environment": {"name": "addition"}, "device": "cpu"}
config = load_config({**parts, "policy": {"model_name": "m", "backend": "deepspeed"}}, manager=manager)
assert config.policy.deepspeed.zero_optimization.stage == 2
heavy = sorted({"torch", "deepspeed", "ray", "transformers"} & set(sys.modules))
sys.exit(f"imported {heavy}" if heavy else 0)
"""


@pytest.fixture
def record(monkeypatch):
    monkeypatch.delenv("RLFRAMEWORK_DISABLE_PLUGINS", raising=False)
    return create_manager(["rlframework_deepspeed.plugin"]).select("policy_worker", "deepspeed").record


def test_the_record_names_the_worker_and_the_section(record):
    assert record.target == "rlframework_deepspeed.worker:DeepSpeedPolicyWorker"
    assert record.config_model is DeepSpeedConfig
    assert record.api_version == 1
    assert record.known_failures == ()


def test_what_deepspeed_does_not_do_here_is_not_declared(record):
    never = {Capability.PIPELINE_PARALLEL, Capability.EXPERT_PARALLEL, Capability.SEQUENCE_PARALLEL}
    assert not never & record.capabilities
    assert Capability.DATA_PARALLEL in record.capabilities


@pytest.mark.slow
def test_a_configuration_is_checked_without_torch_and_deepspeed():
    done = subprocess.run([sys.executable, "-c", LIGHT], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
