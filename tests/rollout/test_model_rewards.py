"""Rewards of a reward model: which rows it scores, how scores and rewards are combined, and in a run."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.further_policies import RewardModelConfig
from rlframework.errors import ConfigError
from rlframework.rollout.model_rewards import add_model_rewards
from rlframework.rollout.result import Rollout
from rlframework.rollout.rollouts import rollout
from rlframework.rollout.seeds import row_seeds


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


@pytest.fixture(scope="module")
def reward_model(tiny_llama: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The weights of the tiny Llama with a random head of scores."""
    from transformers import AutoModelForSequenceClassification

    from rlframework.huggingface.tokenizer import load_tokenizer

    folder = tmp_path_factory.mktemp("reward") / "model"
    torch.manual_seed(4)
    model = AutoModelForSequenceClassification.from_pretrained(tiny_llama, num_labels=1)
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    load_tokenizer(str(tiny_llama)).save_pretrained(folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["dtensor", "deepspeed", "megatron"])
def test_rewards_of_a_run_are_scores_of_transformers(run_config: Any, reward_model: Any, backend: str) -> None:
    """Of whole rows, one by one, so without padding."""
    from safetensors.torch import load_file
    from transformers import AutoModel

    from rlframework.runner.parts import build_parts

    section = f"reward_model={{model_name: {reward_model}, backend: {backend}, environment_weight: 0.0, weight: 2.0}}"
    with build_parts(run_config("grpo", section, "generation.max_new_tokens=16")) as parts:
        found = rollout(parts, parts.environment.samples("train")[:24], row_seeds(0, 1, 24))
    head = load_file(reward_model / "model.safetensors")["score.weight"][0]
    body = AutoModel.from_pretrained(reward_model)
    lengths = found.data["input_lengths"].tolist()
    rows = [ids[:length][None] for ids, length in zip(found.data["input_ids"], lengths, strict=True)]
    with torch.no_grad():
        wanted = [2.0 * float(body(row).last_hidden_state[0, -1] @ head) for row in rows]
    assert found.rewards.tolist() == pytest.approx(wanted, rel=1e-4, abs=1e-5)
    assert found.metrics["reward"] == pytest.approx(sum(wanted) / 24, rel=1e-4, abs=1e-5)
    assert len(set(lengths)) > 1


@pytest.mark.slow
def test_ppo_with_a_reward_model_and_a_critic_that_begins_as_it(run_config: Any, reward_model: Any) -> None:
    from rlframework import run

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
    from probe_runs import refused

    assert "the section 'reward_model' is not used" in refused(run_config("sft", "reward_model={}"), ConfigError)
