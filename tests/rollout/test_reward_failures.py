"""Rewards that fail in asynchronous runs: they are counted over the answers that a training step takes."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframework.base.errors import UserError
from rlframework.environments.dataset import DatasetEnvironment
from rlframework.huggingface.tokenizer import load_tokenizer
from rlframework.interfaces.generation import GenerationResult
from rlframework.rollout.group_players import SingleTurnPlayer, Turns

REWARD = """
import os

def score(completion):
    if completion == "9":
        os._exit(3)
    if completion == "8":
        raise ValueError("bad")
    return {"reward": float(completion), "process": os.getpid()}
"""
GROUPS, ROWS = 4, 4


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
    """2 of 16 answers are the allowed eighth, and would be half of the group whose answers are scored together."""
    answers = [[1, 2, 3, 4], [1, 9, 3, 8], [1, 1, 1, 1], [2, 2, 2, 2]]
    player, groups = play(parts, answers)
    result = player.rollout(groups)
    player.close()
    assert result.rewards.tolist() == [0.0 if answer > 7 else answer for group in answers for answer in group]
    assert result.metrics["reward_failures"] == 2.0
    assert not result.failed.any()


@pytest.mark.slow
def test_too_many_failures_in_the_answers_of_a_step_end_the_run(parts: Any) -> None:
    player, groups = play(parts, [[8, 2, 3, 4], [1, 8, 3, 4], [1, 1, 1, 1], [2, 2, 2, 8]])
    with pytest.raises(UserError, match=r"failed for 3 of 16 answers.*environment\.max_reward_failures=0\.125 allows"):
        player.rollout(groups)
    player.close()


@pytest.mark.slow
def test_the_answers_of_a_failed_group_count_as_answers_of_the_step(parts: Any) -> None:
    """2 of 16 answers, including 4 that were never scored: a synchronous step has 16, too."""
    player, groups = play(parts, [[8, 2, 3, 4], [1, 8, 3, 4], [1, 1, 1, 1]])
    missed = parts.environment.samples("train")[3], ROWS, "it missed its deadline"
    assert player.rollout([*groups, missed]).failed.sum() == ROWS
    player.close()


@pytest.mark.slow
def test_validation_between_rollouts_uses_the_same_process_and_counts_its_own_answers(parts: Any) -> None:
    player, groups = play(parts, [[1, 2]])
    sample = groups[0][0]
    pids = {outcome.metrics["process"] for outcome in groups[0][2].outcomes}

    def scored(*texts: str) -> Any:
        turns = [[*sample.messages, {"role": "assistant", "content": text}] for text in texts]
        return parts.environment.step([sample] * len(texts), turns)

    assert {outcome.metrics["process"] for outcome in scored("1", "2")} == pids
    assert pids != {os.getpid()}
    with pytest.raises(UserError, match=r"(?s)failed for 1 of 2 answers.*ValueError: bad"):
        scored("1", "8")
    player.close()
