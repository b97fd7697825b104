"""Runs of PPO and of each other policy-gradient algorithm, and the same numbers in every layout and on each backend."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, get_args

import pytest
from probe_runs import numbers_of, refused

from rlframework import run
from rlframework.algorithms.reward_groups import RewardSpread
from rlframework.base.errors import ConfigError
from rlframework.config.algorithm_presets import AlgorithmName
from rlframework.runner.launch import dry_run

pytestmark = pytest.mark.slow

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


@pytest.mark.parametrize("name", [name for name in get_args(AlgorithmName) if name != "grpo"])
def test_an_algorithm_trains(run_config: Any, name: str) -> None:
    rows = run(run_config("grpo", f"algorithm.name={name}", *TWO_STEPS)).history
    assert all(row["train/grad_norm"] > 0 and math.isfinite(row["train/loss"]) for row in rows)
    assert ("train/sampling_rounds" in rows[-1]) == (name == "dapo")
    assert ("train/reward_kl" in rows[-1]) == (name in ("rloo", "reinforce_plus_plus"))
    if "train/reward_kl" in rows[-1]:
        assert abs(rows[0]["train/reward_kl"]) < 1e-6  # of the reference with itself
        assert abs(rows[1]["train/reward_kl"]) > 1e-6


def test_one_sample_of_each_prompt(run_config: Any) -> None:
    keys = ["algorithm.name=reinforce_plus_plus", "algorithm.prompts_per_step=32", "algorithm.samples_per_prompt=1"]
    rows = run(run_config("grpo", *keys, *TWO_STEPS)).history
    assert all(row["train/grad_norm"] > 0 and row["train/reward_std"] == 0 for row in rows)


def test_dynamic_sampling_gives_up_after_its_rounds(run_config: Any) -> None:
    """All rewards are equal, so nothing is trained on; each round takes other prompts."""
    keys = ["algorithm.dynamic_sampling=3", "environment.constant=true", *TWO_STEPS]
    rows = run(run_config("grpo", *keys)).history
    assert [row["train/sampling_rounds"] for row in rows] == [3.0, 3.0]
    assert [row["train/sampled_groups_kept"] for row in rows] == [0.0, 0.0]
    assert [row["train/grad_norm"] for row in rows] == [0.0, 0.0]


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


PPO = ["algorithm.name=ppo", "algorithm.samples_per_prompt=1", "algorithm.prompts_per_step=32", "critic={}"]
SAME = [*PPO, NO_VALIDATION, "algorithm.num_steps=2", "algorithm.epochs_per_batch=2"]
COMPARED = ("loss", "grad_norm", "ratio", "value_loss", "critic_grad_norm", "value", "return", "explained_variance")


@pytest.fixture(scope="module")
def reference(make_config: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, float]]:
    """The metrics of the reference backend with padded rows."""
    folder = tmp_path_factory.mktemp("reference")
    return run(make_config(folder, "grpo", *SAME, "policy.batching.mode=padded")).history


@pytest.mark.parametrize("mode", ["padded", "dynamic", "packed"])
@pytest.mark.parametrize("backend", ["dtensor", "deepspeed", "megatron"])
def test_backends_and_batching_modes_agree(run_config: Any, backend: str, mode: str, reference: Any) -> None:
    """The values of the second step are those of a critic that took four optimizer steps."""
    found = run(run_config("grpo", *SAME, f"policy.backend={backend}", f"policy.batching.mode={mode}")).history
    assert abs(reference[0]["train/value"]) == 0.0 < abs(reference[1]["train/value"])  # a new head
    for row, wanted in zip(found, reference, strict=True):
        for name in COMPARED:
            assert row[f"train/{name}"] == pytest.approx(wanted[f"train/{name}"], rel=1e-3, abs=1e-5), name


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (["algorithm.reward_kl={coef: 0.5}", "algorithm.loss.kl_coef=0.04"], 1),
        (["algorithm.reward_kl={coef: 0.5}"], 0),
        (["algorithm.reward_kl={coef: 0.0}", "algorithm.loss.kl_coef=0.04"], 0),
    ],
)
def test_two_penalties_by_the_divergence_are_a_warning(
    run_config: Any, caplog: Any, keys: list[str], told: int
) -> None:
    dry_run(run_config("grpo", *PPO, *keys))
    assert caplog.text.count("algorithm.reward_kl.coef=0.5 and algorithm.loss.kl_coef=0.04: the divergence") == told


def test_the_policy_waits_for_the_critic(run_config: Any, tmp_path: Any) -> None:
    rows = run(run_config("grpo", *PPO, "algorithm.critic_warmup=2", NO_VALIDATION)).history
    assert ["train/loss" in row for row in rows] == [False, False, True]
    assert all(row["train/critic_grad_norm"] > 0 for row in rows)
    assert rows[2]["train/lr"] == 1e-3
    never = refused(run_config("grpo", *PPO, "algorithm.critic_warmup=3", f"output_dir={tmp_path}/never"), ConfigError)
    assert "algorithm.critic_warmup is 3, but must be less than the number of steps, 3" in never
    keys = ["algorithm.critic_warmup=2", "recording.steps=[2]", f"output_dir={tmp_path}/recorded"]
    assert "recording selects step 2, in which only the critic is trained" in refused(
        run_config("grpo", *PPO, *keys), ConfigError
    )


def test_a_penalty_by_the_divergence_of_each_token(run_config: Any) -> None:
    rows = run(run_config("grpo", *PPO, "algorithm.reward_kl={coef: 0.5}", NO_VALIDATION)).history
    assert abs(rows[0]["train/reward_kl"]) < 1e-6 < abs(rows[2]["train/reward_kl"])


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["~critic"], "needs the section 'critic', which is missing"),
        (["critic.head=score"], "critic.head is score, but PPO needs a critic with critic.head=value"),
        (["critic.head_init=checkpoint"], "For a new head on a language model, set critic.head_init=zeros"),
    ],
)
def test_critics_that_are_none(run_config: Any, keys: list[str], message: str) -> None:
    with pytest.raises(Exception, match=message):
        run(run_config("grpo", *PPO, *keys))


def test_a_batch_that_does_not_divide_the_rollout(run_config: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"`critic.train_global_batch_size`.*not a multiple of the global batch size 24"
    ):
        run_config("grpo", *PPO, "critic.train_global_batch_size=24")
