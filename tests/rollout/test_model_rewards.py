"""Rewards of a reward model: which rows it scores, how scores and rewards are combined, and in a run."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from probe_runs import refused, rows_of

from rlframework import run
from rlframework.base.errors import ConfigError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.further_policies import RewardModelConfig
from rlframework.rollout.asynchronous import AsynchronousRollouts
from rlframework.rollout.result import Rollout
from rlframework.rollout.seeds import row_seeds
from rlframework.rollout.step_rollouts import add_model_rewards, rollout


class FirstToken:
    """A reward model whose score of a row is its first token."""

    def __init__(self, **keys: Any) -> None:
        self.config = SimpleNamespace(policy=RewardModelConfig(model_name="m", **keys))
        self.rested = 0

    def score(self, data: Any) -> Any:
        assert self.rested == 0
        return {"scores": data["input_ids"][:, 0].float()}

    def rest(self) -> None:
        self.rested += 1


def played() -> Rollout:
    """Episodes of two rows, of one, and of three; the second one has failed."""
    data: BatchedDataDict[Any] = BatchedDataDict({"input_ids": torch.tensor([[1], [2], [3], [4], [5], [6]])})
    rewards, failed = torch.tensor([0.5, 0.0, -1.0]), torch.tensor([False, True, False])
    lengths, samples = torch.tensor([1, 1, 1]), [None] * 3
    metrics, episodes = {"reward": -0.25, "accuracy": 0.5}, torch.tensor([0, 0, 1, 2, 2, 2])
    texts: Any = [""] * 3
    return Rollout(samples, texts, data, rewards, rewards, lengths, failed, metrics, episodes, failed)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("keys", "rewards"),
    [
        ({}, [2.5, 0.0, 5.0]),
        ({"weight": -2.0}, [0.5 - 4.0, 0.0, -1.0 - 12.0]),
        ({"environment_weight": 0.0}, [2.0, 0.0, 6.0]),
        ({"weight": 0.5, "environment_weight": 4.0}, [3.0, 0.0, -1.0]),
    ],
)
def test_the_last_row_of_an_episode_is_scored(keys: dict[str, float], rewards: list[float]) -> None:
    result, model = played(), FirstToken(**keys)
    add_model_rewards(result, model)  # type: ignore[arg-type]
    assert result.rewards.tolist() == rewards
    mean = (rewards[0] + rewards[2]) / 2
    assert result.metrics == {"reward": mean, "environment_reward": -0.25, "model_score": 4.0, "accuracy": 0.5}
    assert model.rested == 1


def scores_by_hand(folder: Any, found: Rollout) -> list[float]:
    """The scores of the reward model in `folder`: of whole rows, one by one, so without padding."""
    from safetensors.torch import load_file
    from transformers import AutoModel

    head = load_file(folder / "model.safetensors")["score.weight"][0]
    body = AutoModel.from_pretrained(folder)
    lengths = found.data["input_lengths"].tolist()
    rows = [ids[:length][None] for ids, length in zip(found.data["input_ids"], lengths, strict=True)]
    with torch.no_grad():
        return [float(body(row).last_hidden_state[0, -1] @ head) for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dtensor", "deepspeed", "megatron"])
def test_rewards_of_a_run_are_scores_of_transformers(run_config: Any, reward_model: Any, backend: str) -> None:
    from rlframework.runner.parts import build_parts

    section = f"reward_model={{model_name: {reward_model}, backend: {backend}, environment_weight: 0.0, weight: 2.0}}"
    with build_parts(run_config("grpo", section, "generation.max_new_tokens=16")) as parts:
        found = rollout(parts, parts.environment.samples("train")[:24], row_seeds(0, 1, 24))
    wanted = [2.0 * score for score in scores_by_hand(reward_model, found)]
    assert found.rewards.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert found.metrics["reward"] == pytest.approx(sum(wanted) / 24, rel=1e-4, abs=1e-5)
    assert len(set(found.data["input_lengths"].tolist())) > 1


@pytest.mark.slow
def test_an_asynchronous_run_has_the_scores_in_its_rewards(
    run_config: Any, reward_model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In each step, also while the next one is generated; what is reported and logged has them too."""
    ordinary, found = AsynchronousRollouts.rollout, list[Rollout]()

    def seen(self: AsynchronousRollouts, step: int, number: int) -> Rollout:
        found.append(ordinary(self, step, number))
        return found[-1]

    monkeypatch.setattr(AsynchronousRollouts, "rollout", seen)
    keys = ("generation.workers.group=processes", "algorithm.async={max_staleness: 1}", "observers.samples=32")
    section = f"reward_model={{model_name: {reward_model}, environment_weight: 0.0, weight: 2.0}}"
    run(run_config("grpo", section, *keys, "algorithm.validation={every: 0, at_start: false, at_end: false}"))
    logged = rows_of(tmp_path / "run" / "samples.jsonl")
    assert len(found) == 3
    for step, (result, metrics) in enumerate(zip(found, rows_of(tmp_path / "run"), strict=True), start=1):
        wanted = pytest.approx([2.0 * score for score in scores_by_hand(reward_model, result)], rel=1e-4, abs=1e-5)
        assert result.rewards.tolist() == wanted
        assert [row["reward"] for row in logged if row["step"] == step] == wanted
        assert 2.0 * metrics["train/model_score"] == metrics["train/reward"] == pytest.approx(sum(wanted.expected) / 32)


@pytest.mark.slow
def test_ppo_with_a_reward_model_and_a_critic_that_begins_as_it(run_config: Any, reward_model: Any) -> None:
    keys = ["algorithm.name=ppo", "algorithm.samples_per_prompt=1", "algorithm.prompts_per_step=32"]
    sections = [f"reward_model={{model_name: {reward_model}}}", f"critic={{model_name: {reward_model}}}"]
    rows = run(run_config("grpo", *keys, *sections)).history
    for row in rows:
        for kind in ("train", "validation"):
            if f"{kind}/reward" in row:
                both = row[f"{kind}/environment_reward"] + row[f"{kind}/model_score"]
                assert row[f"{kind}/reward"] == pytest.approx(both, rel=1e-5)
    assert abs(rows[1]["train/value"]) > 1e-3


def test_algorithms_without_rewards_reject_it(run_config: Any) -> None:
    assert "the section 'reward_model' is not used" in refused(run_config("sft", "reward_model={}"), ConfigError)
