"""Advantages and the penalty of long completions, by hand."""

from __future__ import annotations

import pytest
import torch

from rlframework.algorithms.advantages import group_advantages, overlong_penalty


def test_group_mean_and_standard_deviation():
    rewards = torch.tensor([1.0, 0, 0, 1, 3, 1, 1, 1])
    advantages, constant = group_advantages(rewards, 4, eps=0.0)
    deviation = (1 / 3) ** 0.5  # of 1, 0, 0, 1 with n - 1
    assert advantages[:4].tolist() == pytest.approx(
        [0.5 / deviation, -0.5 / deviation, -0.5 / deviation, 0.5 / deviation]
    )
    assert advantages[4:].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5])
    assert not constant.any()


def test_leave_one_out_compares_with_the_others():
    advantages, _ = group_advantages(torch.tensor([1.0, 0, 0]), 3, leave_one_out=True, normalize_std=False)
    assert advantages.tolist() == pytest.approx([1.0, -0.5, -0.5])


def test_groups_of_equal_rewards_have_zero_advantage_and_are_marked_constant():
    advantages, constant = group_advantages(torch.tensor([0.1, 0.1, 0.1, 0, 1, 0]), 3)
    assert advantages[:3].tolist() == [0.0, 0.0, 0.0]
    assert constant.tolist() == [True, True, True, False, False, False]


def test_overlong_penalty_falls_linearly_in_the_buffer():
    lengths = torch.tensor([5, 6, 8, 10])
    assert overlong_penalty(lengths, 10, 4, 0.5).tolist() == pytest.approx([0.0, 0.0, -0.25, -0.5])
    assert overlong_penalty(lengths, 10, 0, 0.5).tolist() == [0.0, 0.0, 0.0, 0.0]


def test_a_large_offset_that_all_rewards_share_costs_no_digits():
    rewards = torch.tensor([1000.125, 999.875, 1000.0, 1000.0])  # exact in fp32
    found, _ = group_advantages(rewards, 4)
    assert torch.equal(found, group_advantages(rewards - 1000, 4)[0])
    assert found[0].item() == pytest.approx(0.125 / (0.03125 / 3) ** 0.5, rel=1e-4)  # mean 1000, 2 x 0.125^2 over n - 1
