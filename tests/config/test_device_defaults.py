"""Defaults that depend on the device."""

from __future__ import annotations

import pytest

from rlframework import load_config
from rlframework.cli import main
from rlframework.config.device_defaults import device_defaults
from rlframework.plugins.configure import config_yaml, load


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


@pytest.mark.slow
def test_the_configuration_of_a_run_has_the_values(tmp_path):
    """Resuming on another device must not change them."""
    file = tmp_path / "config.yaml"
    file.write_text(config_yaml(load_config(run_on("cuda"))))
    again, defaults, _ = load(file, ["device=cpu"])
    assert (again.policy.precision, defaults) == ("bfloat16", [])


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
