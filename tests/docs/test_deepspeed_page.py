"""docs/deepspeed.md: the keys that it names are there, its tables say what the section does, its example is taken."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml
from pydantic import BaseModel

from rlframework.config.hints import models_in
from rlframework.config.policy import PolicyConfig
from rlframework.plugins.configure import load_config
from rlframework_deepspeed.config import DeepSpeedConfig
from rlframework_deepspeed.neutral_keys import NEUTRAL
from rlframework_deepspeed.rejected_keys import REJECTED
from rlframework_dtensor.config import DTensorConfig

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deepspeed.md").read_text(encoding="utf-8")
SECTIONS = {"deepspeed": DeepSpeedConfig, "dtensor": DTensorConfig}
KEYS = sorted(set(re.findall(r"`policy\.([a-z_]+(?:\.[a-z0-9_]+)*)", PAGE)))
ROWS = [line.strip("| ").split(" | ") for line in PAGE.splitlines() if line.startswith("| ")]
OWNED = {row[0]: row[1] for row in ROWS if row[0].startswith("`") and not row[0].startswith("`policy.")}


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
    if first in SECTIONS:
        assert not rest or found(SECTIONS[first], rest)
    else:
        assert found(PolicyConfig, [first, *rest])


def test_the_table_of_what_the_framework_decides_has_all_of_it():
    told = {key: decided for names, decided in OWNED.items() for key in re.findall(r"`([a-z0-9_.]+)`", names)}
    for place, neutral in NEUTRAL.items():
        (key,) = [key for key in told if place == key or place.startswith(f"{key}.")]
        assert neutral in told[key] or neutral.rpartition(".")[0] in told[key] or "the two above" in told[key]
        assert found(DeepSpeedConfig, place.split("."))
    assert len(told) == len(NEUTRAL)


def test_keys_that_are_passed_on_or_refused_are_as_the_page_says():
    other = PAGE.partition("Other keys go to DeepSpeed as they are:")[2].partition("\n\n")[0]
    passed, refused = other.split("What this backend does not take")
    zero = DeepSpeedConfig.model_fields["zero_optimization"].annotation
    for key in re.findall(r"`([a-z_]+)`", passed):
        assert key in DeepSpeedConfig.model_fields or key in zero.model_fields
    for key in re.findall(r"`([a-z_]+)`", refused):
        assert key in REJECTED[""] or key in REJECTED["zero_optimization"]


def test_the_default_stage_is_the_one_of_the_table():
    (default,) = [row[0] for row in ROWS if "(the default)" in row[0]]
    assert default.split()[0] == str(DeepSpeedConfig().zero_optimization.stage)


def test_the_example_of_the_page_is_taken(tmp_path, monkeypatch):
    example = re.search(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert example is not None
    monkeypatch.chdir(tmp_path)
    Path("ds_config.json").write_text(json.dumps({"zero_optimization": {"stage": 1, "overlap_comm": True}}))
    run = {"algorithm": {"name": "sft"}, "environment": {"name": "addition"}, "device": "cpu"}
    policy = yaml.safe_load(example[1])["policy"] | {"model_name": "m"}
    zero = load_config({**run, "policy": policy}).policy.deepspeed.zero_optimization
    assert (zero.stage, zero.overlap_comm) == (3, True)


def test_what_is_installed_is_what_the_page_says():
    text = (ROOT / "plugins" / "deepspeed" / "pyproject.toml").read_text(encoding="utf-8")
    (bound,) = re.findall(r'"deepspeed>=(\d+\.\d+)\.', text)
    assert f"DeepSpeed {bound} comes as source" in PAGE
    assert "-e plugins/deepspeed" in (ROOT / "requirements-dev.txt").read_text(encoding="utf-8").splitlines()
