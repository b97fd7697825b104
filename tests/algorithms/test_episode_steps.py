"""Optimizer steps of whole episodes, and the statistics of groups in which episodes have failed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlframework.algorithms.advantages import group_advantages, reward_std
from rlframework.algorithms.losses import ClippedPGLoss
from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.config.algorithms import ClippedPGLossConfig
from rlframework.rollout.optimizer_steps import optimizer_steps

EPISODE_OF = torch.tensor([0, 0, 0, 1, 2, 3, 3, 4, 5])
"""Episodes with 3, 1, 1, 2, 1 and 1 rows."""


def batch(valid: list[float] | None = None) -> BatchedDataDict[Any]:
    """Nine rows of up to five tokens; row n has tokens 10 n and advantage n + 1."""
    lengths = torch.tensor([3, 5, 4, 5, 2, 5, 4, 3, 5])
    real = torch.arange(5) < lengths[:, None]
    mask = real.float() * (torch.arange(5) > 0)
    rows = torch.arange(9)
    return BatchedDataDict(
        {
            "input_ids": (10 * rows[:, None] + torch.arange(5)) * real,
            "input_lengths": lengths,
            "token_mask": mask,
            "sample_mask": torch.tensor(valid or [1.0] * 9),
            "advantages": (rows[:, None] + 1.0) * mask,
        }
    )


def test_a_row_for_each_episode_is_left_as_it_is() -> None:
    data = batch()
    same, rows = optimizer_steps(data, torch.arange(9), episodes=3, ranks=2, level="sequence")
    assert same is data
    assert rows == 3
    assert "sequence_weights" not in data


@pytest.mark.parametrize(
    ("ranks", "rows", "expected"),
    [
        (1, 4, [0, 1, 2, 3, 4, 5, 6, None, 7, 8, None, None]),
        (3, 6, [0, 1, 2, 3, None, None, 4, 5, 6, None, None, None, 7, 8, None, None, None, None]),
    ],
)
def test_a_step_has_the_rows_of_its_episodes_and_dummies(ranks: int, rows: int, expected: list[int | None]) -> None:
    """Of two episodes each: 4, 3 and 2 rows."""
    data, found = optimizer_steps(batch(), EPISODE_OF, episodes=2, ranks=ranks, level="token")
    assert found == rows
    assert "sequence_weights" not in data
    given = batch()
    for place, row in enumerate(expected):
        if row is None:
            assert data["sample_mask"][place] == 0
            assert data["token_mask"][place].sum() == 0
            assert data["input_lengths"][place] == 1
        else:
            assert all(torch.equal(data[key][place], given[key][row]) for key in given)
    assert len(data["input_ids"]) == len(expected)


def test_dummies_have_no_images() -> None:
    """Nor a token that stands for an image, even if the row that they are made from begins with one."""
    data = batch()
    data["pixel_values"] = PackedTensor([torch.full((1, 2), float(row)) for row in range(9)], dim_to_pack=0)
    found, _ = optimizer_steps(data, EPISODE_OF, episodes=2, ranks=1, level="token")
    shown = [None if each is None else each[0, 0].item() for each in found["pixel_values"].tensors]
    assert shown == [0, 1, 2, 3, 4, 5, 6, None, 7, 8, None, None]
    assert found["input_ids"][[7, 10, 11], 0].tolist() == [2] * 3


@pytest.mark.parametrize("level", ["sequence", "constant"])
@pytest.mark.parametrize("valid", [[1.0] * 9, [1, 1, 1, 0, 1, 1, 1, 0, 1], [0, 0, 0, 1, 1, 1, 1, 0, 0]])
def test_a_mean_over_sequences_weighs_an_episode_once(level: Any, valid: list[float]) -> None:
    """Compared with a mean over episodes, computed token by token."""
    data, rows = optimizer_steps(batch(valid), EPISODE_OF, episodes=2, ranks=2, level=level)
    loss = ClippedPGLoss(ClippedPGLossConfig(level=level, constant_length=7 if level == "constant" else None))
    given = batch(valid)
    for step in range(3):
        part = data.slice(step * rows, (step + 1) * rows)
        logprobs = torch.zeros(rows, 4)
        seqs = part["sample_mask"].sum()
        toks = (part["token_mask"][:, 1:] * part["sample_mask"][:, None]).sum()
        found, _ = loss(logprobs, part, seqs, toks)
        means = []
        for episode in (2 * step, 2 * step + 1):
            values = [
                float(given["advantages"][row, column])
                for row in range(9)
                if EPISODE_OF[row] == episode and valid[row]
                for column in range(1, int(given["input_lengths"][row]))
            ]
            if values:
                means.append(-sum(values) / (7 if level == "constant" else len(values)))
        assert float(found) == pytest.approx(sum(means) / max(1, len(means)), rel=1e-6)


def test_advantages_without_failed_samples() -> None:
    """The group 1, 3, 8 has mean 4 and standard deviation sqrt(13); the other rewards of 1 are 3 and 8."""
    rewards = torch.tensor([1.0, 100.0, 3.0, 8.0, 2.0, 5.0, 5.0, 5.0, 9.0, 9.0, 9.0, 4.0])
    left_out = torch.tensor([False, True, False, False, True, False, False, False, True, True, True, False])
    advantages, constant = group_advantages(rewards, 4, normalize_std=False, left_out=left_out)
    assert advantages.tolist() == pytest.approx([-3.0, 0.0, -1.0, 4.0] + [0.0] * 8)
    assert constant.tolist() == [False] * 4 + [True] * 8
    advantages, _ = group_advantages(rewards, 4, leave_one_out=True, normalize_std=False, left_out=left_out)
    assert advantages[:4].tolist() == pytest.approx([-4.5, 0.0, -1.5, 6.0])
    advantages, _ = group_advantages(rewards, 4, eps=0.0, left_out=left_out)
    assert advantages[:4].tolist() == pytest.approx([x / 13**0.5 for x in (-3.0, 0.0, -1.0, 4.0)])
    spread = reward_std(rewards, 4, left_out)
    assert spread == pytest.approx(13**0.5 / 2)  # over the two groups with more than one sample
