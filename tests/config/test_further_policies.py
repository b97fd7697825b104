"""The sections of further policies: what they share with `policy`, their checks, hints and trust."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from rlframework.base.errors import ConfigError, DataError, PluginError
from rlframework.config.further_policies import in_section, naming
from rlframework.config.yaml_text import parse_yaml
from rlframework.plugins.configure import config_yaml, dump_selected, load_config
from rlframework.plugins.manager import create_manager

POLICY = {
    "model_name": "m",
    "tokenizer_name": "t",
    "trust_remote_code": True,
    "precision": "bfloat16",
    "optimizer": {"lr": 1e-3, "weight_decay": 0.5},
    "lora": {"rank": 4},
    "dtensor": {"attention": "eager"},
}
BASE = {
    "policy": POLICY,
    "algorithm": {"name": "grpo"},
    "environment": {"name": "addition"},
    "worker_group": {"name": "processes", "num_workers": 2, "pass_environment": ["X"]},
}


@pytest.fixture(scope="module")
def real() -> Any:
    return create_manager()


def load(real: Any, *overrides: str) -> Any:
    return load_config(BASE, overrides, manager=real)


def test_a_section_shares_what_it_leaves_out(real: Any) -> None:
    critic = load(real, "critic={optimizer: {lr: 1.0e-5}, worker_group: {num_workers: 4}}").critic
    assert (critic.model_name, critic.tokenizer_name, critic.precision) == ("m", "t", "bfloat16")
    assert (critic.optimizer.lr, critic.optimizer.weight_decay, critic.lora) == (1e-5, 0.5, None)
    assert (critic.head, critic.head_init) == ("value", "zeros")
    assert critic.dtensor.attention == "eager"
    assert (critic.worker_group.name, critic.worker_group.num_workers) == ("processes", 4)
    assert critic.worker_group.pass_environment == ("X",)


def test_another_model_shares_no_keys_that_describe_a_model(real: Any) -> None:
    critic = load(real, "critic={model_name: other, worker_group: {name: inline}}").critic
    assert (critic.tokenizer_name, critic.head_init, critic.trust_remote_code) == (None, "checkpoint", False)
    assert (critic.precision, critic.worker_group.num_workers) == ("bfloat16", 1)


@pytest.mark.slow
def test_models_that_are_not_trained_share_nothing_of_training(real: Any) -> None:
    config = load(real, "teacher={}", "reward_model={weight: 2.0}")
    assert config.teacher.lora is config.reward_model.lora is None
    assert config.teacher.optimizer.weight_decay == 0.01
    assert (config.teacher.head, config.reward_model.head) == ("language", "score")
    assert config.critic is None
    load(real, "teacher={worker_group: {num_workers: 3}}")  # no batches are trained on, so nothing must divide them
    with pytest.raises(ConfigError, match=r"`critic.train_global_batch_size`: must be a multiple of 3"):
        load(real, "critic={worker_group: {num_workers: 3}}")


@pytest.mark.slow
def test_the_resolved_configuration_loads_to_an_equal_one(real: Any) -> None:
    config = load(real, "critic={model_name: other}", "teacher={backend: deepspeed}", "reward_model={}")
    assert load_config(parse_yaml(config_yaml(config), "x"), manager=real) == config
    assert {"dtensor", "deepspeed", "megatron"} & dump_selected(config)["teacher"].keys() == {"deepspeed"}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("critic.bakend=x", "`critic.bakend`: unknown key .* Did you mean `critic.backend`"),
        ("critic.lora=3", "`critic.lora`: must be a section"),
        ("critic=3", "`critic`: must be a section"),
        ("teacher.head=score", "`teacher.head`: must be 'language'"),
        ("teacher.lora={rank: 2}", "`teacher.lora`: "),
        ("critic.optim.lr=1", "`lr`: `critic.optimizer.lr`"),
        ("lr=1", "Did you mean `policy.optimizer.lr`"),
        ("teacher={parallelism: {tensor: 3}}", r"`teacher.worker_group.num_workers`: .*\(teacher.parallelism: tensor"),
        (
            "reward_model={worker_group: {name: inline, num_workers: 2}}",
            "reward_model.worker_group.name=inline supports",
        ),
        ("critic={parallelism: {pipeline: 2}}", "`critic.parallelism.pipeline`: 2, but the backend 'dtensor'"),
        ("critic.worker_group.passs=1", "`critic.worker_group.passs`: unknown key"),
    ],
)
def test_errors_name_the_keys_of_the_section(real: Any, override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(real, override)


@pytest.mark.parametrize("override", ["critic.backend=x", "critic.worker_group.name=x"])
def test_a_part_that_is_not_installed_is_named_with_its_key(real: Any, override: str) -> None:
    with pytest.raises(PluginError, match=override.partition("=")[0]):
        load(real, override)


def test_settings_of_a_process_must_be_equal_in_one_process(real: Any) -> None:
    options = [
        "device=cuda",
        "policy.tf32=true",
        "critic.tf32=false",
        "policy.lora=null",
        "policy.dtensor.compile=false",
    ]
    load(real, *options)
    inline = ["worker_group={name: inline, num_workers: 1}", "~worker_group.pass_environment"]
    with pytest.raises(ConfigError, match=r"`critic.tf32`: must be true like policy.tf32"):
        load(real, *options, *inline)


def test_a_run_may_not_decide_what_needs_trust_in_a_section(real: Any, tmp_path: Path) -> None:
    def loaded(critic: str, *overrides: str) -> Any:
        values = BASE | {"policy": {"model_name": "m"}, "critic": parse_yaml(critic, "x").values}
        return load_config(values, overrides, manager=real, run=tmp_path)

    with pytest.raises(ConfigError, match=r"critic.trust_remote_code=True, which runs Python code"):
        loaded("{trust_remote_code: true}")
    assert loaded("{}", "policy.trust_remote_code=true").critic.trust_remote_code
    assert not loaded("{model_name: theirs}", "policy.trust_remote_code=true").critic.trust_remote_code
    with pytest.raises(ConfigError, match=r"critic.worker_group.environment"):
        loaded("{worker_group: {environment: {LD_PRELOAD: x}}}")


def test_messages_are_about_the_section() -> None:
    text = "policy.model_name and worker_group.num_workers, but not a.policy.x or my_policy.y, of the policy."
    wanted = "critic.model_name and critic.worker_group.num_workers, but not a.policy.x or my_policy.y, of the policy."
    assert in_section(text, "critic") == wanted
    with pytest.raises(DataError, match=r"^teacher: no file"), naming("teacher"):
        raise DataError("no file")


def test_the_sections_on_the_page_are_valid(real: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "further_policies.md").read_text(encoding="utf-8")
    blocks = [parse_yaml(text, "page").values for text in re.findall(r"```yaml\n(.*?)```", page, re.DOTALL)]
    assert len(blocks) == 2
    for block in blocks:
        values = {"algorithm": {"name": "ppo"}, "policy": {"model_name": "m"}, **block}
        values["environment"] = {"name": "addition"}  # others need data
        load_config(values, ["algorithm.prompts_per_step=64"], manager=real)
