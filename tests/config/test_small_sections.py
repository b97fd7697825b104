"""Uploads, images, asynchrony and defaults of the device: small sections of the configuration and what they reject."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rlframework.base.errors import ConfigError
from rlframework.cli import main
from rlframework.config.algorithms import GRPOConfig
from rlframework.config.asynchrony import AsyncConfig
from rlframework.config.device_defaults import device_defaults
from rlframework.plugins.configure import config_yaml, load, load_config

SECRETS = [
    "s3://me:s3cr3t-word@bucket/run",
    "abfs://me:s3cr3t-word@account.dfs.core.windows.net/run",
    "abfs://s3cr3t-word@host/run",
    "abfs://data@account.dfs.core.windows.net/run?sig=s3cr3t-word",
    "s3://bucket/run?secret_access_key=s3cr3t-word",
]
ADDRESSES = [
    "s3://bucket/run-7",
    "file:///mnt/share/run-7",
    "abfs://data/run-7",
    "abfss://data@account.dfs.core.windows.net/run-7",
]


@pytest.mark.parametrize("url", SECRETS)
def test_an_address_with_a_secret_is_rejected_and_the_secret_not_repeated(manager: Any, minimal: Any, url: str) -> None:
    with pytest.raises(ConfigError, match=r"`checkpoints\.upload`: .* password or key; give .* environment") as error:
        load_config({**minimal, "checkpoints": {"upload": url}}, manager=manager)
    assert "s3cr3t-word" not in str(error.value)


@pytest.mark.parametrize("url", ADDRESSES)
def test_an_address_stays_as_it_was_given(manager: Any, minimal: Any, url: str) -> None:
    assert load_config({**minimal, "checkpoints": {"upload": url}}, manager=manager).checkpoints.upload == url


def test_a_path_without_a_protocol_is_rejected(manager: Any, minimal: Any) -> None:
    with pytest.raises(ConfigError, match=r"`checkpoints\.upload`: must be an address such as s3://"):
        load_config({**minimal, "checkpoints": {"upload": "bucket/run"}}, manager=manager)


def test_resuming_from_uploads_needs_their_address(manager: Any, minimal: Any) -> None:
    with pytest.raises(ConfigError, match="resume_uploaded needs upload, the address"):
        load_config(minimal, ["checkpoints.resume_uploaded=true"], manager=manager)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("algorithm.name=distillation", "is for sft, grpo and its presets, ppo, and algorithms on preference pairs"),
        ("algorithm.name=process_reward_model", "pairs, not for algorithm.name=process_reward_model"),
        ("algorithm.name=sft algorithm.token_data=tokens", "token data has no images"),
        ("teacher.model_name=m", "must be null with the further policy teacher, which gets no images"),
    ],
)
def test_what_would_lose_images_is_rejected(tmp_path: Path, overrides: str, message: str) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(
        "policy: {model_name: m}\nalgorithm: {name: grpo}\n"
        "environment: {name: dataset, path: rows.jsonl, check: exact, images: {}}\n"
    )
    assert load_config(path).environment.images is not None
    assert load_config(path, ["algorithm.name=dapo"]).algorithm.name == "dapo"
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides.split())
    assert message in str(error.value)


def correction(**keys: Any) -> str:
    config = GRPOConfig(**keys)
    assert GRPOConfig(**config.model_dump()) == config
    return str(config.loss.importance_correction)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("given", "corrected"),
    [
        ({}, "none"),
        ({"async": {}}, "truncated"),
        ({"async": {"max_staleness": 2}}, "truncated"),
        ({"asynchronous": AsyncConfig()}, "truncated"),
        ({"async": {"max_staleness": 0}}, "none"),
        ({"async": {}, "loss": {"kl_coef": 0.1}}, "truncated"),
        ({"async": {}, "loss": {"importance_correction": "none"}}, "none"),
        ({"async": {}, "loss": {"importance_mask": "token"}}, "none"),
    ],
)
def test_tokens_that_may_be_stale_are_corrected(given: dict[str, Any], corrected: str) -> None:
    assert correction(**given) == corrected


def test_the_page_has_every_key_with_its_default() -> None:
    text = (Path(__file__).parents[2] / "docs" / "asynchronous.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    config = load_config(yaml.safe_load(example) | {"policy": {"model_name": "m"}, "environment": {"name": "addition"}})
    assert config.algorithm.asynchronous == AsyncConfig()  # type: ignore[attr-defined]
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+?) \|", text, re.MULTILINE))
    defaults = AsyncConfig().model_dump()
    assert {name: rows[name].strip("`") for name in defaults} == {
        name: "null" if value is None else str(value) for name, value in defaults.items()
    }


def run_on(device: str, **policy):
    return {
        "output_dir": "run",
        "device": device,
        "algorithm": {"name": "sft"},
        "environment": {"name": "addition"},
        "policy": {"model_name": "somewhere", **policy},
    }


def test_a_gpu_computes_in_bfloat16_and_a_cpu_in_fp32():
    assert load_config(run_on("cuda")).policy.precision == "bfloat16"
    assert load_config(run_on("cpu")).policy.precision == "float32"
    assert load(run_on("cpu")).defaults == []


def test_what_the_user_sets_is_kept():
    config, defaults, _ = load(run_on("cuda", precision="float32"))
    assert (config.policy.precision, config.policy.tf32) == ("float32", True)
    assert [default.key for default in defaults] == ["policy.tf32", "policy.expandable_segments"]
    assert not load_config(run_on("cuda"), ["policy.tf32=false"]).policy.tf32


def test_the_best_checkpoint_is_that_of_early_stopping():
    stopping = "algorithm.early_stopping={metric: train/loss, best: lowest}"
    kept = load_config(run_on("cpu"), [stopping]).checkpoints
    assert (kept.metric, kept.best) == ("train/loss", "lowest")
    same = load_config(run_on("cpu"), [stopping, "checkpoints.metric=train/loss"]).checkpoints
    assert (same.metric, same.best) == ("train/loss", "lowest")
    other = load_config(run_on("cpu"), [stopping, "checkpoints.metric=validation/reward"]).checkpoints
    assert (other.metric, other.best) == ("validation/reward", "highest")


def test_a_backend_without_bfloat16_keeps_fp32():
    config = load_config(run_on("cpu"))
    assert "policy.precision" not in [default.key for default in device_defaults(config, "cuda", bfloat16=False)]


def test_memory_is_not_extended_in_place_beside_an_engine_that_may_exclude_it():
    config = load_config(run_on("cpu"))
    config = config.model_copy(update={"generation": config.generation.model_copy(update={"name": "other"})})
    assert "policy.expandable_segments" not in [
        default.key for default in device_defaults(config, "cuda", bfloat16=True)
    ]


@pytest.mark.slow
def test_the_command_gives_the_reasons(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text(config_yaml(load_config(run_on("cpu"))).replace("device: cpu", "device: cuda"))
    with pytest.raises(SystemExit):
        main(["config", str(file), "~policy.precision"])
    printed = capsys.readouterr().out
    assert "# policy.precision: 'bfloat16' is a default on a GPU: matrix products" in printed
    assert "precision: bfloat16" in printed
