"""Rewards of a reward model, and rewards that fail in asynchronous runs: they are counted over a step."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from probe_runs import refused

from rlframework.base.errors import ConfigError, UserError
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.further_policies import RewardModelConfig
from rlframework.environments.dataset import DatasetEnvironment
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.generation import GenerationResult
from rlframework.rollout.group_players import SingleTurnPlayer, Turns
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


def test_algorithms_without_rewards_reject_it(run_config: Any) -> None:
    assert "the section 'reward_model' is not used" in refused(run_config("sft", "reward_model={}"), ConfigError)


REWARD = """
import os

def score(completion):
    if completion == "9":
        os._exit(3)
    if completion == "8":
        raise ValueError("bad")
    return {"reward": float(completion), "process": os.getpid()}
"""
ROWS = 4


class Answers:
    """A bridge whose engine answers with the text of the seed."""

    max_new_tokens = 8

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def begin(self) -> str:
        return "session"

    def end(self, session: str) -> None:
        assert session == "session"

    async def complete_group(self, prompt: torch.Tensor, seeds: Any, *_: object) -> list[GenerationResult]:
        rows = [torch.tensor(self._tokenizer.encode(str(seed), add_special_tokens=False)) for seed in seeds]
        return [GenerationResult("", ids, torch.zeros(len(ids)), "stop", ()) for ids in rows]


@pytest.fixture
def parts(run_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The parts that a player needs, with a reward function that fails for the answer 8, and ends for 9."""
    (tmp_path / "failing_reward.py").write_text(REWARD)
    rows = [{"prompt": f"{number}?", "answer": "1"} for number in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "failing_reward", raising=False)
    section = "{name: dataset, path: rows.jsonl, reward: 'failing_reward:score', max_reward_failures: 0.125}"
    config = run_config("grpo", "~environment", f"environment={section}")
    environment = DatasetEnvironment(config.environment, seed=0)
    tokenizer = load_tokenizer(config.policy.model_name)
    yield SimpleNamespace(config=config, environment=environment, tokenizer=tokenizer, timeline=None, images=None)
    environment.shutdown()


def play(parts: Any, answers: Sequence[Sequence[int]]) -> tuple[SingleTurnPlayer, list[Any]]:
    """Play a group with each of `answers`, one after the other, so that each is scored alone."""
    player, samples = SingleTurnPlayer(parts), parts.environment.samples("train")

    async def groups() -> list[Turns]:
        async with player.playing(Answers(parts.tokenizer)):  # type: ignore[arg-type]
            return [await player.play(sample, own) for sample, own in zip(samples, answers, strict=False)]

    played = asyncio.run(groups())
    return player, [(sample, len(group.texts), group) for sample, group in zip(samples, played, strict=False)]


@pytest.mark.slow
def test_a_process_that_dies_costs_its_answer_and_is_counted_over_the_step(parts: Any) -> None:
    """2 of 16 answers are the allowed eighth, and would be half of the group whose answers are scored together.

    Those of a group that has failed count too, although they were never scored: a synchronous step has 16.
    """
    answers = [[1, 2, 3, 4], [1, 9, 3, 8], [1, 1, 1, 1]]
    player, groups = play(parts, answers)
    missed = parts.environment.samples("train")[3], ROWS, "it missed its deadline"
    result = player.rollout([*groups, missed])
    player.close()
    scored = [0.0 if answer > 7 else answer for group in answers for answer in group]
    assert result.rewards.tolist() == scored + [0.0] * ROWS
    assert result.metrics["reward_failures"] == 2.0
    assert result.failed.tolist() == [False] * len(scored) + [True] * ROWS


@pytest.mark.slow
def test_too_many_failures_in_the_answers_of_a_step_end_the_run(parts: Any) -> None:
    player, groups = play(parts, [[8, 2, 3, 4], [1, 8, 3, 4], [1, 1, 1, 1], [2, 2, 2, 8]])
    with pytest.raises(UserError, match=r"failed for 3 of 16 answers.*environment\.max_reward_failures=0\.125 allows"):
        player.rollout(groups)
    player.close()
