"""The pages of our backends: their tables say what the sections do, and their examples and programs are taken."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from rlframework.plugins.configure import load_config
from rlframework.plugins.manager import create_manager
from rlframework.plugins.types import Capability
from rlframework_conformance import cases
from rlframework_conformance.oracle import Oracle
from rlframework_deepspeed.config import DeepSpeedConfig
from rlframework_deepspeed.neutral_keys import NEUTRAL
from rlframework_deepspeed.rejected_keys import REJECTED
from rlframework_megatron.architectures import ARCHITECTURES
from rlframework_megatron.config import MegatronConfig

ROOT = Path(__file__).parents[2]
DEEPSPEED, MEGATRON, DTENSOR = (
    (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8") for name in ("deepspeed", "megatron", "dtensor")
)
RUN = {"algorithm": {"name": "sft"}, "environment": {"name": "addition"}, "device": "cpu"}


def rows(page: str) -> list[list[str]]:
    return [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| ")]


def example(page: str, language: str) -> str:
    found = re.search(rf"^```{language}\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[1]


def test_the_table_of_what_decides_in_place_of_deepspeed_has_all_of_it():
    owned = {row[0]: row[1] for row in rows(DEEPSPEED) if row[0].startswith("`") and not row[0].startswith("`policy.")}
    told = {key: decided for names, decided in owned.items() for key in re.findall(r"`([a-z0-9_.]+)`", names)}
    for place, neutral in NEUTRAL.items():
        (key,) = [key for key in told if place == key or place.startswith(f"{key}.")]
        assert neutral in told[key] or neutral.rpartition(".")[0] in told[key] or "the two above" in told[key]
    assert len(told) == len(NEUTRAL)
    (default,) = [row[0] for row in rows(DEEPSPEED) if "(the default)" in row[0]]
    assert default.split()[0] == str(DeepSpeedConfig().zero_optimization.stage)


def test_keys_that_are_passed_on_or_refused_are_as_the_page_of_deepspeed_says():
    other = DEEPSPEED.partition("Other keys go to DeepSpeed as they are:")[2].partition("\n\n")[0]
    passed, refused = other.split("What this backend does not take")
    zero = DeepSpeedConfig.model_fields["zero_optimization"].annotation
    for key in re.findall(r"`([a-z_]+)`", passed):
        assert key in DeepSpeedConfig.model_fields or key in zero.model_fields
    for key in re.findall(r"`([a-z_]+)`", refused):
        assert key in REJECTED[""] or key in REJECTED["zero_optimization"]


def test_the_examples_are_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 1, "overlap_comm": True}}))
    loaded = {}
    for name, page in (("deepspeed", DEEPSPEED), ("megatron", MEGATRON)):
        keys = yaml.safe_load(example(page, "yaml"))
        loaded[name] = load_config({**RUN, **keys, "policy": keys["policy"] | {"model_name": "m"}})
    zero = loaded["deepspeed"].policy.deepspeed.zero_optimization
    assert (zero.stage, zero.overlap_comm) == (3, True)
    config = loaded["megatron"]
    assert config.policy.megatron == MegatronConfig(distributed_optimizer=True, virtual_pipeline=2)
    assert config.worker_group.num_workers // config.policy.parallelism.model_size == 2  # as its comment says


@pytest.mark.parametrize(
    ("name", "pattern", "said"),
    [
        ("deepspeed", r'"deepspeed>=(\d+\.\d+)\.', "DeepSpeed {} comes as source"),
        ("megatron", r'"megatron-core==([0-9.]+)"', "It takes megatron-core {},"),
    ],
)
def test_the_release_is_the_one_that_is_installed(name, pattern, said):
    (release,) = re.findall(pattern, (ROOT / "plugins" / name / "pyproject.toml").read_text(encoding="utf-8"))
    assert said.format(release) in (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


def test_the_tables_of_megatron_have_its_keys_axes_and_models():
    ours = {row[0].strip("`"): row[1].strip("`") for row in rows(MEGATRON) if row[0].startswith("`policy.megatron.")}
    defaults = {f"policy.megatron.{key}": str(value).lower() for key, value in MegatronConfig().model_dump().items()}
    assert ours == defaults
    axes = [re.sub(r"\W*true\W*$", "", row[0]).strip("`") for row in rows(MEGATRON) if ".parallelism." in row[0]]
    declared = create_manager().select("policy_worker", "megatron").record.capabilities
    named = {f"{axis.rpartition('.')[2]}_parallel" for axis in axes} | {"data_parallel"}
    assert named == {capability.value for capability in declared if capability.value.endswith("_parallel")}
    assert {Capability.SHARDED_CHECKPOINTS, Capability.PORTABLE_OPTIMIZER_STATE} <= declared
    models = dict(re.findall(r"^\| `([a-z0-9_]+)` \| ([^|]+) \|", MEGATRON, re.MULTILINE))
    assert models == {kind: described.name for kind, described in ARCHITECTURES.items()}


@pytest.mark.slow
def test_the_program_of_dtensor_gives_scores(tmp_path, monkeypatch):
    model, batch = cases.model("reward", tmp_path), cases.batch()
    (tmp_path / "judge.yaml").write_text(yaml.safe_dump({**RUN, "policy": {"model_name": str(model), "head": "score"}}))
    monkeypatch.chdir(tmp_path)
    names = {"batch": batch}
    exec(example(DTENSOR, "python"), names)  # noqa: S102 - the page is ours
    right = Oracle(model, head="checkpoint").last_values(batch)
    torch.testing.assert_close(names["scores"], right.detach(), rtol=1e-5, atol=1e-5)
