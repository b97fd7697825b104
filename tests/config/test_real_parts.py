"""`load_config` with the real manager: core's own parts, and a backend that is not installed."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlframework.base.errors import ConfigError, PluginError
from rlframework.config.policy import RemoteGroupConfig
from rlframework.plugins.configure import config_yaml, dump_config, load_config

PARTS = {"policy": {"model_name": "m"}, "algorithm": {"name": "grpo"}, "environment": {"name": "addition"}}
BACKEND = """
from rlframework.config.base import Section
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import Capability, PolicyWorkerRecord, Problem


class ToyConfig(Section):
    speed: int = 3


def check(config, device):
    return [Problem("policy.toy.speed", "is too much.", "Take 9.")] if config.policy.toy.speed > 9 else []


@hookimpl
def rlframework_policy_workers():
    return [PolicyWorkerRecord("toy", "toy:Worker", 1, config_model=ToyConfig, check=check)]
"""


@pytest.fixture
def config_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on a backend that lies beside the configuration and is not installed."""
    (tmp_path / "toy_backend_for_config.py").write_text(BACKEND)
    monkeypatch.syspath_prepend(tmp_path)
    path = tmp_path / "run.yaml"
    path.write_text(
        "plugins: [toy_backend_for_config]\n"
        "policy: {model_name: m, backend: toy}\n"
        "algorithm: {name: grpo}\n"
        "environment: {name: addition, digits: 1}\n"
        "output_dir: nowhere\n"
    )
    return path


@pytest.mark.slow
def test_a_run_on_a_backend_that_is_not_installed(config_file: Path) -> None:
    config = load_config(config_file, ["policy.toy.speed=5", "algorithm.loss.kl_coef=0.1"])
    assert config.policy.toy.speed == 5  # type: ignore[attr-defined]
    assert config.algorithm.loss.kl_coef == 0.1  # type: ignore[attr-defined]
    assert config.environment.digits == 1  # type: ignore[attr-defined]
    assert config.generation.name == "transformers"
    printed = config_file.parent / "printed.yaml"
    printed.write_text(config_yaml(config))
    assert load_config(printed) == config


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("environment.train_path=x", "It is a key of `gsm8k`, but environment.name is `addition`"),
        ("policy.toy.speed=10", "`policy.toy.speed`: is too much (in override `policy.toy.speed=10`). Take 9."),
        ("policy.parallelism.tensor=2", "`worker_group.num_workers`: must be a multiple of 2"),
        ("policy.train_global_batch_size=100", "samples_per_prompt=8), not a multiple of the global batch size 100"),
        ("generation.temperature=0", "greedy completions of a prompt are all identical"),
        ("algorithm.validation={attempts: 4, temperature: 0}", "validation.attempts`: must be 1 at temperature 0"),
        ("generation.top_k=20", "`generation.top_k`: 20 samples from a truncated distribution, but"),
        ("generation.top_p=0.9", "`generation.top_p`: 0.9 samples from a truncated distribution, but"),
        ("algorithm.overlong.buffer=65", "overlong.buffer`: 65 exceeds generation.max_new_tokens, which is 64 (in"),
        ("algorithm.loss={ratio_clip_max: 0.3, ratio_clip_c: 1.3}", "must be greater than 1 + ratio_clip_max = 1.3"),
        ("worker_group.num_workers=2", "worker_group.name=inline supports one worker, not 2"),
        ("plugins=[no_such_module]", "`plugins`: module 'no_such_module' cannot be used: ModuleNotFoundE"),
    ],
)
def test_mistakes_are_told(config_file: Path, override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        load_config(config_file, [override])
    assert message in str(error.value)


@pytest.mark.parametrize(
    "override",
    [
        "algorithm.overlong.buffer=64",
        "algorithm.loss={ratio_clip_max: 0.3, ratio_clip_c: 1.31}",
        "generation={top_k: null, top_p: 1.0}",
    ],
)
def test_the_last_values_that_are_right(config_file: Path, override: str) -> None:
    load_config(config_file, [override])


def test_an_unknown_backend_is_told_with_the_nearest_name(config_file: Path) -> None:
    with pytest.raises(PluginError, match="Did you mean 'toy'"):
        load_config(config_file, ["policy.backend=toyy"])


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("policy.train_global_batch_size=1000000000", "must be less than or equal to 1,000,000"),
        ("generation.max_new_tokens=1000000000", "must be less than or equal to 10,000,000"),
        ("generation.temperature=1e-9", "must be 0 or at least 0.001"),
        ("generation.temperature=.inf", "must be a finite number"),
        ("policy.optimizer.lr=1e7", "must be less than or equal to 1,000,000"),
        ("policy.optimizer.eps=1e-40", "must be greater than or equal to 1e-30"),
        ("policy.optimizer.weight_decay=.nan", "must be a finite number"),
        ("algorithm.loss.ratio_clip_max=1e308", "must be less than or equal to 1,000,000"),
        ("algorithm.prompts_per_step=900000", "must be at most 1000000 rows, but is 7200000"),
        ("algorithm.epochs_per_batch=1e9", "must be less than or equal to 1,000,000"),
        ("worker_group.num_workers=1000000000", "must be less than or equal to 100,000"),
        ("worker_group.deadlines.call=1e300", "must be less than or equal to 10,000,000"),
        ("fault_tolerance.max_restarts=5000", "must be less than or equal to 1,000"),
        ("seed=18446744073709551616", "must be less than or equal to 9,223,372,036,854,775,807"),
        ("policy.dtensor.replicate=1000000", "must be less than or equal to 100,000"),
    ],
)
def test_a_number_that_is_certainly_a_mistake_is_rejected_with_its_bound(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(PARTS, [override])
    key, _, _ = override.partition("=")
    assert message in str(caught.value)
    assert key in str(caught.value) or key.rpartition(".")[0] in str(caught.value)


@pytest.mark.parametrize(
    "override", ['output_dir="a\\0b"', 'environment.prompt="{expression}\\0"', 'observers.wandb={tags: ["\\0"]}']
)
def test_no_text_has_a_null_character(override: str) -> None:
    with pytest.raises(ConfigError, match=r"must not contain the character U\+0000"):
        load_config(PARTS, [override])


def test_another_worker_group_for_the_configuration_of_a_run(config_file: Path) -> None:
    """A run's configuration has every key; those of the earlier group are dropped where they have their defaults."""
    ran = dump_config(load_config(config_file, ["worker_group.name=ray", "worker_group.deadlines.call=99"]))
    changed = load_config(ran, ["worker_group.name=processes"])
    assert type(changed.worker_group) is RemoteGroupConfig
    assert changed.worker_group.deadlines.call == 99
    for given, override in (({"placement": "spread"}, ()), ({}, ("worker_group.placement=pack",))):
        values = {**ran, "worker_group": {**ran["worker_group"], **given}}
        with pytest.raises(ConfigError, match="It is a key of `ray`, but worker_group"):
            load_config(values, ["worker_group.name=processes", *override])
