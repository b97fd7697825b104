"""docs/megatron.md: the keys that it names are there, its tables say what the section does, its example is taken."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from rlframework.config.hints import models_in
from rlframework.config.policy import PolicyConfig
from rlframework.plugins.configure import load_config
from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import Capability
from rlframework_megatron.architectures import ARCHITECTURES
from rlframework_megatron.config import MegatronConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "megatron.md").read_text(encoding="utf-8")
KEYS = sorted(set(re.findall(r"`policy\.([a-z_]+(?:\.[a-z0-9_]+)*)", PAGE)))
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| `policy.")]


def found(model: type[BaseModel], keys: list[str]) -> bool:
    """Whether `model` has the key, section by section."""
    first, *rest = keys
    if first not in model.model_fields:
        return False
    inner = models_in(model.model_fields[first].annotation)
    return not rest or bool(inner and found(inner[0], rest))


@pytest.mark.parametrize("key", KEYS)
def test_the_keys_that_the_page_names_are_there(key):
    first, *rest = key.split(".")
    assert found(MegatronConfig, rest) if first == "megatron" and rest else found(PolicyConfig, [first, *rest])


def test_the_table_of_its_own_keys_has_all_of_them_and_their_defaults():
    told = {row[0].strip("`"): row[1].strip("`") for row in ROWS if row[0].startswith("`policy.megatron.")}
    defaults = {f"policy.megatron.{key}": str(value).lower() for key, value in MegatronConfig().model_dump().items()}
    assert told == defaults


def test_the_axes_of_the_table_are_those_that_the_backend_declares():
    record = create_manager().select("policy_worker", "megatron").record
    told = {
        re.sub(r"\W*true\W*$", "", row[0]).strip("`").rpartition(".")[2] for row in ROWS if ".parallelism." in row[0]
    }
    named = {f"{axis}_parallel" for axis in told} | {"data_parallel"}
    assert named == {capability.value for capability in record.capabilities if capability.value.endswith("_parallel")}


def test_models_and_release_are_as_the_page_says():
    told = dict(re.findall(r"^\| `([a-z0-9_]+)` \| ([^|]+) \|", PAGE, re.MULTILINE))
    assert told == {kind: described.name for kind, described in ARCHITECTURES.items()}
    text = (ROOT / "plugins" / "megatron" / "pyproject.toml").read_text(encoding="utf-8")
    (release,) = re.findall(r'"megatron-core==([0-9.]+)"', text)
    assert f"It takes megatron-core {release}," in PAGE
    assert "-e plugins/megatron" in (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()


def test_both_forms_of_checkpoints_are_declared():
    declared = create_manager().select("policy_worker", "megatron").record.capabilities
    assert {Capability.SHARDED_CHECKPOINTS, Capability.PORTABLE_OPTIMIZER_STATE} <= declared


def test_the_example_of_the_page_is_taken():
    example = re.search(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert example is not None
    run = {"algorithm": {"name": "sft"}, "environment": {"name": "addition"}, "device": "cpu"}
    keys = yaml.safe_load(example[1])
    config = load_config({**run, **keys, "policy": keys["policy"] | {"model_name": "m"}})
    assert config.policy.megatron == MegatronConfig(distributed_optimizer=True, virtual_pipeline=2)
    assert config.worker_group.num_workers // config.policy.parallelism.model_size == 2  # as its comment says
