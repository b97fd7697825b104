"""Rollouts that are repeated until enough groups have rewards that differ."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframework.algorithms.reward_groups import differing_groups, sample_groups
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


def test_a_first_rollout_with_enough_groups_is_the_only_one() -> None:
    result, played = sampled([1, 0, 0, 1], rounds=3)
    assert played == [0]
    assert result.completions == ["0.0", "0.1", "0.2", "0.3"]
    assert result.metrics["sampled_groups_kept"] == 1.0


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
