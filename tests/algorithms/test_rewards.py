"""Rewards and metrics of an environment that are not usable numbers end the step before they reach any statistics."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stub_engines import AnswersB

from rlframework.algorithms.advantages import group_advantages
from rlframework.base.errors import UserError
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import LARGEST_REWARD, Sample, StepOutcome
from rlframework.rollout.single_turn import single_turns


def rolled(outcomes: list[StepOutcome]) -> Any:
    """The rollout of two samples, in an environment that answers with `outcomes`."""
    config = SimpleNamespace(environment=SimpleNamespace(name="mine"))
    environment = SimpleNamespace(step=lambda samples, conversations: outcomes, scores=True)
    parts: Any = SimpleNamespace(
        tokenizer=character_tokenizer("ab"),
        generation=AnswersB(),
        environment=environment,
        config=config,
        images=None,
        timeline=None,
    )
    samples = [Sample(name, ({"role": "user", "content": "a"},), "b") for name in ("one", "two")]
    return single_turns(parts, samples, torch.arange(2))


def test_the_largest_rewards_give_finite_statistics() -> None:
    rewards = rolled([StepOutcome(LARGEST_REWARD), StepOutcome(-LARGEST_REWARD)]).rewards
    for settings in ({}, {"normalize_std": False}, {"leave_one_out": True}):
        advantages, _ = group_advantages(rewards.repeat(1000), 2000, **settings)
        assert advantages.isfinite().all()
    assert rewards.std().isfinite()


@pytest.mark.parametrize(
    "wrong", [1e308, 10**400, float("nan"), float("-inf"), "1", None, [1.0], 2 * LARGEST_REWARD, torch.ones(2)]
)
def test_a_reward_that_is_no_usable_number_names_the_sample(wrong: Any) -> None:
    with pytest.raises(UserError, match=r"environment 'mine' returned reward=.* for sample 'two'"):
        rolled([StepOutcome(1.0), StepOutcome(wrong)])
    with pytest.raises(UserError, match=r"returned bonus=.* for sample 'one'"):
        rolled([StepOutcome(1.0, metrics={"bonus": wrong}), StepOutcome(1.0)])


def test_another_number_of_outcomes() -> None:
    with pytest.raises(UserError, match="environment 'mine' returned 1 outcomes for 2 samples"):
        rolled([StepOutcome(1.0)])
