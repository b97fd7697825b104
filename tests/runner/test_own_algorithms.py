"""Whole runs with algorithms and advantages that are given by import path."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlframework import config_yaml, load_config, run
from rlframework.base.errors import ConfigError, PluginError

pytestmark = pytest.mark.slow

OWN = "probe_own_algorithms"
DIGITS = ["~environment", "environment={name: 'probe_own_environments:Counting'}"]


def test_an_algorithm_by_its_import_path(run_config, tmp_path: Path) -> None:
    config = run_config("grpo", "~algorithm", f"algorithm={{name: '{OWN}:Counting', upto: 7}}")
    (tmp_path / "printed_algorithm.yaml").write_text(config_yaml(config))
    assert load_config(tmp_path / "printed_algorithm.yaml") == config
    assert run(config).metrics["counted"] == 7.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Counting, upo: 3", "Did you mean `algorithm.upto`"),
        ("Missing", r"algorithm\.name: .*\.py\) has no 'Missing'"),
        (
            "not_a_class",
            r"algorithm\.name: .* must be a class derived from rlframework\.algorithms\.algorithm\.Algorithm",
        ),
        ("CountingConfig", "must be a class derived"),
        ("Half", "does not implement run"),
    ],
)
def test_algorithms_that_cannot_be_used_are_rejected(run_config, name: str, message: str) -> None:
    name, _, rest = name.partition(",")
    section = f"{{name: '{OWN}:{name}'{',' * bool(rest)}{rest}}}"
    with pytest.raises((ConfigError, PluginError), match=message):
        run_config("grpo", "~algorithm", f"algorithm={section}")


def test_a_subclass_of_a_built_in_algorithm_has_its_keys_and_more(run_config) -> None:
    section = f"{{name: '{OWN}:Capped', cap: 0.25, num_steps: 1, prompts_per_step: 4, samples_per_prompt: 4}}"
    config = run_config("grpo", *DIGITS, "~algorithm", f"algorithm={section}")
    assert run(config).history[1]["train/largest_advantage"] == 0.25


@pytest.mark.parametrize("name", ["Bare", "Capped"])
@pytest.mark.parametrize("preset", ["verl", "trl", "paper", "nemo_rl"])
def test_a_subclass_of_grpo_has_its_section_and_its_presets(run_config, name: str, preset: str) -> None:
    own, built_in = (
        run_config("grpo", f"algorithm.name={given}", f"algorithm.preset={preset}").algorithm.model_dump()
        for given in (f"{OWN}:{name}", "grpo")
    )
    assert own.pop("name") == f"{OWN}:{name}"
    del built_in["name"]
    assert {key: own[key] for key in built_in} == built_in


def test_an_own_advantage_takes_the_place_of_the_comparison(run_config, tmp_path: Path) -> None:
    """The differences from the mean by a function are those of the built-in baseline without a standard deviation."""
    same = [*DIGITS, "algorithm.num_steps=2"]
    own = [f"algorithm.advantage={OWN}:from_the_mean", f"output_dir={tmp_path / 'own'}"]
    built_in = ["algorithm.normalize_std=false", f"output_dir={tmp_path / 'built_in'}"]
    runs = [run(run_config("grpo", *same, *keys)).history for keys in (own, built_in)]
    assert runs[0][1]["train/grad_norm"] > 0
    for name in ("train/loss", "train/grad_norm", "train/zero_variance_groups"):
        assert [row[name] for row in runs[0][1:3]] == pytest.approx([row[name] for row in runs[1][1:3]], rel=1e-4)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("Missing", r"`algorithm\.advantage`: .*has no 'Missing'"),
        ("Counting", "is not a function; define `def compare"),
        ("of_one", r"cannot be called with rewards and a rollout: its parameters are \(rewards\)"),
    ],
)
def test_own_advantages_that_cannot_be_used_are_rejected(run_config, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config("grpo", f"algorithm.advantage={OWN}:{path}")
