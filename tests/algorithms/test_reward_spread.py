"""The warning of groups that differ by a small part of the reward alone; its figures are calculated by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframework.algorithms.grpo import GRPO
from rlframework.algorithms.reward_groups import RewardSpread
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.rollout.result import Rollout


def played(rewards: list[float], parts: Any = (), turns: Any = (), failed: Any = ()) -> Rollout:
    """Episodes with these rewards, in groups of two; equal completion lengths."""
    count = len(rewards)
    values, lengths = torch.tensor(rewards), torch.ones(count)
    out = torch.tensor([index in failed for index in range(count)])
    transcripts = [[{"trained": True}] * number for number in turns]
    data: BatchedDataDict[Any] = BatchedDataDict({})
    none: Any = [None] * count
    return Rollout(
        none, [""] * count, data, values, values, lengths, out, {}, torch.arange(count), out, transcripts, parts=parts
    )


def warnings_of(caplog: Any, *rollouts: Rollout) -> list[str]:
    spread = RewardSpread(2)
    for step, result in enumerate(rollouts, start=1):
        spread.note(step, result)
    return [record.getMessage() for record in caplog.records]


SOLVED = played([1.0, -0.1, 0.9, -0.1])
QUITTING = [-0.02, -0.06, -0.02, -0.04]


def test_equal_rewards_are_those_of_episodes_that_have_not_failed(caplog: pytest.LogCaptureFixture) -> None:
    config = SimpleNamespace(samples_per_prompt=2, group_baseline=True)
    grpo: Any = SimpleNamespace(_noted_equal_groups=False, config=config)
    GRPO._note_equal_groups(grpo, 1, played([1.0, 0.0, 1.0, 1.0], failed=[1]), {"train/zero_variance_groups": 2.0})
    assert "in each of the 2 groups all rewards are equal (all are 1), " in caplog.text


def test_a_penalty_that_alone_remains_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """The range is 1.1, so 0.04 and 0.02 are small."""
    parts = [{"solved": 0.0, "penalty": value} for value in QUITTING]
    [message] = warnings_of(caplog, SOLVED, played(QUITTING, parts), played(QUITTING, parts))
    assert message.startswith(
        "step 2: in 2 of 2 groups the rewards differ by at most 0.04, although this run has had rewards from -0.1 to "
        "1. What remains of the reward there is its part `penalty`."
    )


def test_a_penalty_that_is_no_part_is_found_by_what_it_counts(caplog: pytest.LogCaptureFixture) -> None:
    [message] = warnings_of(caplog, SOLVED, played(QUITTING, turns=[1, 3, 1, 2]))
    assert "is what follows the number of turns." in message


def test_a_mixture_is_not_named(caplog: pytest.LogCaptureFixture) -> None:
    """Within groups `a` differs by 1 and -1 where the rewards fall: their products cancel, but for 0.02 - 0.01."""
    parts = [{"a": value} for value in (1.0, 0.0, 0.0, 1.0)]
    [message] = warnings_of(caplog, SOLVED, played(QUITTING, parts))
    assert "No single part of the reward remains there." in message


@pytest.mark.parametrize(
    "result",
    [
        played([1.0, 0.98, 0.96, 1.0]),  # near the best: the task is solved, and its rest is refined
        played([-0.1, -0.1, -0.1, -0.1]),  # equal rewards have a warning of their own
        played([-0.02, -0.06, 1.0, -0.06]),  # one of two groups is not most of them
        played([-0.02, -0.5, -0.02, -0.5]),  # 0.48 is not small beside 1.5
        played([-0.02, -0.06, -0.02, -0.04], failed=(1, 3)),  # an episode that failed is in no group
    ],
)
def test_steps_without_a_warning(caplog: pytest.LogCaptureFixture, result: Rollout) -> None:
    assert not warnings_of(caplog, SOLVED, result)


def test_a_task_that_has_never_shown_more_is_not_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    assert not warnings_of(caplog, played(QUITTING), played(QUITTING))
