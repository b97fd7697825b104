"""`algorithm.reference_sync`: what the reference is after each step, and that a resumed run goes on with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from probe_runs import assert_same_run, numbers_of

from rlframework import run
from rlframework.base.errors import ConfigError
from rlframework.runner.launch import resume

KL = "algorithm.loss.kl_coef=0.5"


def sync(steps: int, alpha: float) -> str:
    return f"algorithm.reference_sync={{steps: {steps}, alpha: {alpha}}}"


def metric(folder: Path, name: str) -> list[float]:
    return [row[name] for row in numbers_of(folder).values() if name in row]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["format: portable", "format: sharded, asynchronous: true"])
def test_a_resumed_run_goes_on_with_the_reference_that_moved(run_config: Any, tmp_path: Path, form: str) -> None:
    saves = f"checkpoints={{every: 1, keep_last: 9, {form}}}"
    keys = [KL, sync(2, 0.6), saves, "algorithm.validation.at_end=false"]
    run(run_config("grpo", *keys, "algorithm.num_steps=5", f"output_dir={tmp_path / 'whole'}"))
    config = run_config("grpo", *keys, "algorithm.num_steps=3", f"output_dir={tmp_path / 'two'}")
    run(config)
    resume(config.output_dir, ["algorithm.num_steps=5"])
    assert_same_run(tmp_path / "whole", tmp_path / "two")
    assert metric(tmp_path / "two", "train/reference_synced") == [0.0, 1.0, 0.0, 1.0, 0.0]
    folders = [(tmp_path / "whole" / f"checkpoints/step-00000{step}/reference").is_dir() for step in (1, 2, 5)]
    assert folders == [False, True, True]


@pytest.mark.slow
def test_a_copy_of_the_policy_has_no_divergence_before_the_next_step(run_config: Any, tmp_path: Path) -> None:
    keys = [KL, "algorithm.num_steps=3", "policy={optimizer: {lr: 1e-2}, train_global_batch_size: 32}"]
    for name, more in (("moved", [sync(1, 1.0)]), ("kept", [])):
        run(run_config("grpo", *keys, *more, f"output_dir={tmp_path / name}"))
    moved, kept = (metric(tmp_path / name, "train/kl") for name in ("moved", "kept"))
    assert moved == pytest.approx([0.0] * 3, abs=1e-6)
    assert min(kept[1:]) > 1e-4


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["policy.lora={}", KL], "must be null with policy.lora: the reference is the base model"),
        ([], "Set algorithm.loss.kl_coef or algorithm.reward_kl.coef above 0"),
    ],
)
def test_a_reference_that_cannot_move_is_rejected(run_config: Any, more: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config("grpo", sync(2, 0.6), *more)
