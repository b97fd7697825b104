"""Whole runs with reward functions and environments that are given by import path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlframework import config_yaml, load_config, run
from rlframework.base.errors import ConfigError, PluginError, UserError

pytestmark = pytest.mark.slow

OWN = "probe_own_environments"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with twenty rows."""
    rows = [{"prompt": f"{n}+1=", "answer": n} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def with_reward(name: str, **keys: Any) -> list[str]:
    section = json.dumps({"name": "dataset", "path": "rows.jsonl", "reward": f"{OWN}:{name}", **keys})
    return ["~environment", f"environment={section}"]


def with_environment(name: str, **keys: Any) -> list[str]:
    return ["~environment", f"environment={json.dumps({'name': f'{OWN}:{name}', **keys})}"]


@pytest.mark.parametrize("timeout", [None, 60.0], ids=["here", "process"])
def test_grpo_on_an_own_reward(run_config, folder: Path, timeout: float | None) -> None:
    result = run(run_config("grpo", *with_reward("digits", reward_timeout=timeout)))
    for row in result.history:
        kind = "validation" if row["step"] == 0 else "train"
        assert 0.0 <= row[f"{kind}/reward"] <= 1.0
        assert row[f"{kind}/reward_failures"] == 0.0
        assert row[f"{kind}/reward/length"] <= 3 * 2  # tokens are characters, or the names of special tokens
    assert (folder / "run" / "model").is_dir()


def test_failures_are_metrics_of_the_step(run_config) -> None:
    """Each step has every row (16 of 20 train, about 4 are held out): rows 0, 4, ... fail."""
    keys = {"max_reward_failures": 1.0, "failed_reward": -1.0}
    result = run(run_config("grpo", *with_reward("fails_for_some", **keys), "algorithm.validation.at_start=false"))
    counts = [row["train/reward_failures"] for row in result.history]
    assert all(count % 8 == 0 for count in counts)  # all eight answers of a prompt fail, or none
    assert sum(counts) > 0


def test_too_many_failures_end_the_run_without_a_model(run_config, folder: Path) -> None:
    config = run_config("grpo", *with_reward("fails_for_some", max_reward_failures=0.01))
    with pytest.raises(UserError, match=rf"{OWN}\.py, line \d+\) failed for 1 of (the first \d+ of )?\d+ answers"):
        run(config)
    assert not (folder / "run" / "model").exists()


def test_a_path_that_does_not_work_is_a_mistake_in_the_configuration(run_config, folder: Path) -> None:
    with pytest.raises(ConfigError, match=r"`environment\.reward`: .*probe_own_environments\.py\) has no 'none'"):
        run_config("grpo", *with_reward("none"))
    assert not (folder / "run").exists()


def test_sft_judges_what_it_validates_by_the_own_reward(run_config) -> None:
    result = run(run_config("sft", *with_reward("digits")))
    assert result.metrics["validation/reward_failures"] == 0.0
    assert result.metrics["validation/reward/length"] > 0.0


@pytest.mark.parametrize("group", ["inline", "processes"])
def test_an_environment_by_its_import_path(run_config, folder: Path, group: str) -> None:
    config = run_config("grpo", *with_environment("Counting", upto=7), f"worker_group.name={group}")
    assert config.environment.upto == 7
    (folder / "printed.yaml").write_text(config_yaml(config))
    assert load_config(folder / "printed.yaml") == config
    assert run(config).metrics["train/reward"] >= 0.0


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("Counting", {"upo": 3}, "Did you mean `environment.upto`"),
        ("Plain", {"upto": 3}, r"`environment.upto`: unknown key(.|\n)*declared by its attribute `config_model`"),
        ("Missing", {}, r"environment\.name: .*\.py\) has no 'Missing'"),
        ("not_a_class", {}, r"must be a class derived from rlframework\.interfaces\.environment\.Environment"),
        ("digits", {}, "must be a class derived"),
        ("Half", {}, "does not implement __init__"),
        ("Mistyped", {}, r"config_model of the environment '.*Mistyped' must be a class derived from"),
    ],
)
def test_environments_that_cannot_be_used_are_told(run_config, name: str, keys: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, PluginError), match=message):
        run_config("grpo", *with_environment(name, **keys))


def test_an_environment_that_cannot_be_made_is_told_with_its_line(run_config) -> None:
    made = r"Unmade' cannot be made: AttributeError in its constructor: .*'upto' \(.*probe_own_environments\.py:\d+\)\."
    with pytest.raises(UserError, match=made):
        run(run_config("grpo", *with_environment("Unmade")))


def test_an_environment_that_cannot_score_is_told_before_anything_starts(run_config) -> None:
    with pytest.raises(PluginError, match=r"Unscored' implements neither `step` nor `episode`"):
        run(run_config("grpo", *with_environment("Unscored")))
