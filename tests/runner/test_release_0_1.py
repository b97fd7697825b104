"""Files of release 0.1: its configurations load, and its models train on with the numbers of that release.

`fixtures/release_0_1` was made with 0.1: a model, two configurations and the folders of their runs. The supervised run
takes all rows at each step, so that its numbers do not depend on their order.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from rlframework import load_config, resume, run
from rlframework.base.errors import ConfigError
from rlframework.config.yaml_text import read_yaml

OLD = Path(__file__).parents[1] / "fixtures" / "release_0_1"


@pytest.fixture
def old(tmp_path, monkeypatch) -> Path:
    """The files of 0.1, in the current directory."""
    folder = Path(shutil.copytree(OLD, tmp_path / "old"))
    monkeypatch.chdir(folder)
    return folder


def numbers(folder: Path) -> list[tuple[float, float]]:
    """Loss and gradient norm of each training step."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(row["train/loss"], row["train/grad_norm"]) for row in rows if "train/loss" in row]


def differences(old: object, new: object, key: str = "") -> list[str]:
    """The keys of `old` that are missing in `new` or have another value there."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [found for name in old for found in differences(old[name], new.get(name), f"{key}.{name}")]
    return [] if old == new else [key]


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["sft", "grpo"])
def test_a_resolved_configuration_keeps_every_value(old, phase):
    values = read_yaml(old / phase / "config.yaml").values
    assert differences(values, load_config(old / phase / "config.yaml").model_dump(mode="json")) == []
    load_config(old / f"{phase}.yaml", ["policy.activation_checkpointing=true"])


@pytest.mark.slow
def test_a_supervised_run_has_the_numbers_of_0_1(old):
    run(load_config(old / "sft.yaml", ["output_dir=new", "observers.console=false"]))
    assert len(numbers(old / "sft")) == 3
    for before, after in zip(numbers(old / "sft"), numbers(old / "new"), strict=True):
        assert after == pytest.approx(before, rel=1e-5)


@pytest.mark.slow
def test_a_model_that_0_1_trained_is_trained_on(old):
    result = run(load_config(old / "grpo.yaml", ["output_dir=new", "observers.console=false"]))
    assert result.metrics["step"] == 1


def test_a_run_of_0_1_cannot_be_resumed_and_the_error_names_its_model(old):
    with pytest.raises(ConfigError, match=r"no checkpoint to resume from.*policy\.model_name=sft/model"):
        resume("sft")
