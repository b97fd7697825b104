"""Runs of each policy-gradient algorithm, and the same loss of whole rows in every layout."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
from probe_runs import assert_same_run, numbers_of

from rlframework import run
from rlframework.algorithms.reward_groups import RewardSpread
from rlframework.base.errors import ConfigError
from rlframework.config.algorithm_presets import AlgorithmName
from rlframework.runner.launch import resume

NO_VALIDATION = "algorithm.validation={every: 0, at_start: false, at_end: false}"
TWO_STEPS = ["algorithm.num_steps=2", NO_VALIDATION]
LOSS = (
    "{ratio_clip_min: 0.5, ratio_clip_max: 0.5, importance_correction: truncated, importance_level: sequence, "
    "importance_mask: geometric, kl_coef: 0.1}"
)
SEQUENCES = [
    "algorithm.name=gspo", "algorithm.num_steps=1", "algorithm.epochs_per_batch=2", NO_VALIDATION,
    f"algorithm.loss={LOSS}", "policy.optimizer.lr=1e-2",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in get_args(AlgorithmName) if name != "grpo"])
def test_an_algorithm_trains(run_config: Any, name: str) -> None:
    rows = run(run_config("grpo", f"algorithm.name={name}", *TWO_STEPS)).history
    assert all(row["train/grad_norm"] > 0 and math.isfinite(row["train/loss"]) for row in rows)
    assert ("train/sampling_rounds" in rows[-1]) == (name == "dapo")
    assert ("train/reward_kl" in rows[-1]) == (name in ("rloo", "reinforce_plus_plus"))
    if "train/reward_kl" in rows[-1]:
        assert abs(rows[0]["train/reward_kl"]) < 1e-6  # of the reference with itself
        assert abs(rows[1]["train/reward_kl"]) > 1e-6


@pytest.mark.slow
def test_one_sample_of_each_prompt(run_config: Any) -> None:
    keys = ["algorithm.name=reinforce_plus_plus", "algorithm.prompts_per_step=32", "algorithm.samples_per_prompt=1"]
    rows = run(run_config("grpo", *keys, *TWO_STEPS)).history
    assert all(row["train/grad_norm"] > 0 and row["train/reward_std"] == 0 for row in rows)


@pytest.mark.slow
def test_dynamic_sampling_gives_up_after_its_rounds(run_config: Any) -> None:
    """All rewards are equal, so nothing is trained on; each round takes other prompts."""
    keys = ["algorithm.dynamic_sampling=3", "environment.constant=true", *TWO_STEPS]
    rows = run(run_config("grpo", *keys)).history
    assert [row["train/sampling_rounds"] for row in rows] == [3.0, 3.0]
    assert [row["train/sampled_groups_kept"] for row in rows] == [0.0, 0.0]
    assert [row["train/grad_norm"] for row in rows] == [0.0, 0.0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("keys", "noted"),
    [
        (["algorithm.normalize_std=true"], [1, 2]),
        (["algorithm.normalize_std=false"], []),
        (["algorithm.name=ppo", "critic={}"], []),
    ],
)
def test_spreads_count_where_deviations_of_groups_are_divided_out(
    run_config: Any, monkeypatch: pytest.MonkeyPatch, keys: list[str], noted: list[int]
) -> None:
    steps = list[int]()
    monkeypatch.setattr(RewardSpread, "note", lambda self, step, result: steps.append(step))
    run(run_config("grpo", *keys, *TWO_STEPS))
    assert steps == noted


LAYOUTS = {
    "packed": ["policy.batching.mode=packed"],
    "padded": ["policy.batching.mode=padded", "policy.train_micro_batch_size=4"],
    "context": ["policy.batching.mode=packed", "policy.parallelism.context=2"],
    "tensor": ["policy.batching.mode=dynamic", "policy.parallelism.tensor=2"],
}


@pytest.fixture(scope="module")
def alone(make_config: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The metrics of one worker with padded rows."""
    config = make_config(tmp_path_factory.mktemp("alone"), "grpo", *SEQUENCES, "policy.batching.mode=padded")
    return run(config).history[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_quantities_of_sequences_are_those_of_one_worker(run_config: Any, layout: str, alone: dict[str, float]) -> None:
    """The second pass has ratios that are not 1; the weights of sequences differ from 1 by rounding alone."""
    split = "policy.parallelism" in "".join(LAYOUTS[layout])
    workers = ["worker_group={name: processes, num_workers: 2}"] if split else []
    found = run(run_config("grpo", *SEQUENCES, *LAYOUTS[layout], *workers)).history[-1]
    assert abs(alone["train/ratio"] - 1.0) > 1e-4
    for name in ("train/loss", "train/grad_norm", "train/ratio", "train/kl", "train/importance_weight"):
        assert found[name] == pytest.approx(alone[name], rel=1e-4, abs=1e-6), name


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
