"""Groups of rewards: rollouts repeated until enough differ, and the warning of small differences, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframework.algorithms.grpo import GRPO
from rlframework.algorithms.reward_groups import RewardSpread, differing_groups, sample_groups
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.rollout.result import Rollout


def rollout(number: int, rewards: list[float], rows: list[int] | None = None, width: int = 3) -> Rollout:
    """Episodes named by rollout and place; episode n has `rows[n]` rows, whose tokens are 100 number + 10 n + row."""
    rows = rows or [1] * len(rewards)
    episode_of = torch.repeat_interleave(torch.arange(len(rewards)), torch.tensor(rows))
    tokens = torch.tensor([100 * number + 10 * n + row for n, count in enumerate(rows) for row in range(count)])
    data: BatchedDataDict[Any] = BatchedDataDict(
        {
            "input_ids": tokens[:, None].expand(-1, width).clone(),
            "input_lengths": torch.full((len(tokens),), width),
            "sample_mask": torch.ones(len(tokens)),
        }
    )
    names = [f"{number}.{n}" for n in range(len(rewards))]
    values, none = torch.tensor(rewards, dtype=torch.float32), torch.zeros(len(rewards), dtype=torch.bool)
    samples: list[Any] = [SimpleNamespace(id=name) for name in names]
    metrics = {"reward": float(values.mean())}
    return Rollout(samples, names, data, values, values, torch.tensor(rows), none, metrics, episode_of, none.clone())


def sampled(*rewards: list[float], rounds: int, groups: int = 2, **options: Any) -> tuple[Rollout, list[int]]:
    played = []

    def play(number: int) -> Rollout:
        played.append(number)
        return rollout(number, rewards[number], **options)

    return sample_groups(play, groups=groups, samples_per_prompt=2, rounds=rounds, pad_id=7), played


def test_without_it_the_rollout_is_left_as_it_is() -> None:
    result, played = sampled([1, 1, 0, 0], rounds=0)
    assert played == [0]
    assert result.completions == ["0.0", "0.1", "0.2", "0.3"]
    assert "sampling_rounds" not in result.metrics


def test_it_ends_when_there_are_enough_groups() -> None:
    result, played = sampled([1, 1, 0, 1], [0, 0, 1, 1], [0, 1, 1, 0], [9, 9, 9, 9], rounds=10)
    assert played == [0, 1, 2]
    assert result.completions == ["0.2", "0.3", "2.0", "2.1"]
    assert [sample.id for sample in result.samples] == result.completions
    assert result.rewards.tolist() == [0.0, 1.0, 0.0, 1.0]
    assert result.data["input_ids"][:, 0].tolist() == [20, 30, 200, 210]
    assert result.episode_of.tolist() == [0, 1, 2, 3]
    assert result.metrics == {"reward": pytest.approx(1.75 / 3), "sampling_rounds": 3.0, "sampled_groups_kept": 0.5}


def test_groups_of_equal_rewards_fill_up_after_the_last_round() -> None:
    result, played = sampled([1, 1, 0, 0], [5, 5, 0, 1], rounds=2)
    assert played == [0, 1]
    assert result.completions == ["1.2", "1.3", "0.0", "0.1"]


def test_rows_of_episodes_stay_together_and_in_order() -> None:
    result, _ = sampled([1, 1, 0, 1], [0, 1, 1, 1], rounds=2, rows=[2, 1, 1, 3])
    assert result.completions == ["0.2", "0.3", "1.0", "1.1"]
    assert result.data["input_ids"][:, 0].tolist() == [20, 30, 31, 32, 100, 101, 110]
    assert result.episode_of.tolist() == [0, 1, 1, 1, 2, 2, 3]


def test_failed_samples_do_not_make_a_group_differ() -> None:
    result = rollout(0, [1.0, 0.0, 2.0, 2.0, 0.0, 0.0])
    result.failed[1] = result.failed[4] = result.failed[5] = True
    assert differing_groups(result, 2).tolist() == [False, False, False]
    result.failed[1] = False
    assert differing_groups(result, 2).tolist() == [True, False, False]


def test_rollouts_of_other_widths_are_padded() -> None:
    parts = [rollout(0, [1, 1, 0, 1], width=3), rollout(1, [0, 1, 1, 1], width=5)]
    result = sample_groups(parts.__getitem__, groups=2, samples_per_prompt=2, rounds=2, pad_id=7)
    assert result.data["input_ids"].tolist() == [[20] * 3 + [7] * 2, [30] * 3 + [7] * 2, [100] * 5, [110] * 5]
    assert result.data["input_lengths"].tolist() == [3, 3, 5, 5]


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
