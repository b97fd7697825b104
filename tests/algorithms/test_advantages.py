"""Advantages and the penalty of long completions, by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlframework.algorithms.advantages import (
    group_advantages,
    overlong_penalty,
    own_advantages,
    sum_to_end,
)
from rlframework.base.errors import UserError


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


def test_own_advantages_are_those_of_the_function_and_zero_for_what_has_failed() -> None:
    """Groups whose advantages are all 0 count as constant, whatever their rewards are."""
    rewards = torch.tensor([[1.0, 0.0, 4.0], [2.0, 2.0, 5.0]])
    result: Any = SimpleNamespace(failed=torch.tensor([False, True, False, False, False, True]))

    def above_median(groups: torch.Tensor, rollout: Any) -> torch.Tensor:
        assert rollout is result
        return (groups - groups.median(1, keepdim=True).values).double()

    advantages, constant = own_advantages(above_median, rewards, result)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == [0.0, 0.0, 3.0, 0.0, 0.0, 0.0]
    assert constant.tolist() == [False] * 3 + [True] * 3


def test_the_deviation_of_all_rewards() -> None:
    """1, 3, 5, 5: mean 3.5, squares 11; those that are left out do not count."""
    rewards = torch.tensor([1.0, 3.0, 5.0, 5.0])
    advantages, _ = group_advantages(rewards, 2, normalize_std="batch", eps=0.0)
    assert advantages.tolist() == pytest.approx([x / (11 / 3) ** 0.5 for x in (-1.0, 1.0, 0.0, 0.0)])
    left_out = torch.tensor([False, False, False, True])
    advantages, _ = group_advantages(rewards, 2, normalize_std="batch", eps=0.0, left_out=left_out)
    assert advantages.tolist() == pytest.approx([-0.5, 0.5, 0.0, 0.0])  # 1, 3, 5 have the deviation 2


def test_other_rewards_that_are_equal_do_not_divide() -> None:
    """0.1 is no binary fraction, so the deviation of 0.1, 0.1, 0.1 is rounding; it must not be divided by."""
    rewards = torch.tensor([0.7, 0.1, 0.1, 0.1, 0.3, 0.3, 0.3, 0.3])
    advantages, _ = group_advantages(rewards, 4, leave_one_out=True, normalize_std="others", eps=0.0)
    assert advantages[0].item() == pytest.approx(0.6, rel=1e-5)
    assert advantages[1].item() == pytest.approx(-0.2 / (0.6 / 3**0.5), rel=1e-5)  # of 0.7, 0.1, 0.1
    assert advantages[4:].tolist() == [0.0] * 4


def test_the_sum_to_the_end_spans_the_rows_of_an_episode() -> None:
    values = torch.tensor([[0.0, 1.0, 2.0], [0.0, 4.0, 0.0], [0.0, 8.0, 16.0]])
    found = sum_to_end(values, torch.tensor([0, 0, 1]))
    assert found.tolist() == [[7.0, 7.0, 6.0], [4.0, 4.0, 0.0], [24.0, 24.0, 16.0]]


@pytest.mark.parametrize(
    ("compare", "message"),
    [
        (
            lambda groups, rollout: (groups - groups.mean(1, keepdim=True)) / groups.std(1, keepdim=True),
            r"returned \[nan, nan\] for the rewards \[0.5, 0.5\]; .* standard deviation",
        ),
        (lambda groups, rollout: torch.zeros(4), r"'mine:compare' returned a value of shape \(4,\)"),
        (lambda groups, rollout: [0.0] * 4, "'mine:compare' returned a value of class list"),
    ],
    ids=["not finite", "another shape", "a list"],
)
def test_own_advantages_are_one_number_for_each_reward(compare: Any, message: str) -> None:
    result: Any = SimpleNamespace(failed=torch.zeros(4, dtype=torch.bool))
    with pytest.raises(UserError, match=message):
        own_advantages(compare, torch.tensor([[0.0, 1.0], [0.5, 0.5]]), result, "mine:compare")
