"""Runs of PPO: on each backend and in each batching mode, resumed, with a critic of its own, and with warm-up."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from probe_runs import assert_same_weights, numbers_of, refused
from safetensors.torch import load_file

from rlframework import run
from rlframework.base.errors import ConfigError
from rlframework.runner.launch import dry_run, resume

pytestmark = pytest.mark.slow

PPO = ["algorithm.name=ppo", "algorithm.samples_per_prompt=1", "algorithm.prompts_per_step=32", "critic={}"]
NO_VALIDATION = "algorithm.validation={every: 0, at_start: false, at_end: false}"
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


@pytest.mark.thorough
def test_a_resumed_run_has_the_numbers_of_a_whole_one(run_config: Any, tmp_path: Any) -> None:
    keys = [*PPO, "checkpoints.every=2", "algorithm.validation={every: 2, samples: 8, at_end: false}"]
    run(run_config("grpo", *keys, f"output_dir={tmp_path}/whole", "algorithm.num_steps=4"))
    totals = ["policy.scheduler.total_steps=4", "critic.scheduler.total_steps=4"]
    run(run_config("grpo", *keys, f"output_dir={tmp_path}/two", "algorithm.num_steps=2", *totals))
    resume(tmp_path / "two", ["algorithm.num_steps=4"])
    whole, two = numbers_of(tmp_path / "whole"), numbers_of(tmp_path / "two")
    assert [whole[step] for step in (3, 4)] == [two[step] for step in (3, 4)]
    assert_same_weights(tmp_path / "whole", tmp_path / "two")
    ends = [load_file(tmp_path / name / "critic" / "model.safetensors") for name in ("whole", "two")]
    assert all(torch.equal(weight, ends[1][name]) for name, weight in ends[0].items())


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
