"""Rows of a trajectory, by hand."""

from __future__ import annotations

import pytest
import torch

from rlframework.interfaces.generation import GenerationResult, WeightSpan
from rlframework.rollout.trajectory import Trajectory


def turn(ids: list[int], version: int = 0) -> GenerationResult:
    logprobs = -torch.tensor(ids, dtype=torch.float32) / 10
    return GenerationResult("r", torch.tensor(ids), logprobs, "stop", (WeightSpan(0, len(ids), version),))


def ids(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_prompts_that_repeat_all_tokens_extend_one_row() -> None:
    made = Trajectory()
    assert made.add(ids(1, 2), turn([3, 4], version=7)) == 0
    assert made.add(ids(1, 2, 3, 4, 5), turn([6], version=8)) == 0
    [row] = made.rows
    assert row.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert row.token_mask.tolist() == [False, False, True, True, False, True]
    assert row.logprobs.tolist() == pytest.approx([0, 0, -0.3, -0.4, 0, -0.6])
    assert row.turns.tolist() == [-1, -1, 0, 0, -1, 1]
    assert row.spans == (WeightSpan(2, 4, 7), WeightSpan(5, 6, 8))
    assert (made.turns, made.breaks, made.tokens) == (2, 0, 6)
    assert (row.token_ids.dtype, row.logprobs.dtype, row.turns.dtype) == (torch.int64, torch.float32, torch.int64)


@pytest.mark.parametrize("prompt", [(1, 2, 9, 4, 5), (1, 2, 3), (1, 2), (1, 2, 3, 5)])
def test_a_prompt_that_changes_history_begins_a_row(prompt: tuple[int, ...]) -> None:
    made = Trajectory()
    made.add(ids(1, 2), turn([3, 4]))
    assert made.add(ids(*prompt), turn([6])) == 1
    assert made.rows[1].token_ids.tolist() == [*prompt, 6]
    assert made.rows[1].token_mask.tolist() == [False] * len(prompt) + [True]
    assert made.rows[1].turns.tolist() == [-1] * len(prompt) + [1]
    assert made.rows[0].token_ids.tolist() == [1, 2, 3, 4]
    assert (made.turns, made.breaks, made.tokens) == (2, 1, 4 + len(prompt) + 1)


def test_the_longest_row_is_extended() -> None:
    made = Trajectory()
    made.add(ids(1), turn([2]))
    made.add(ids(1), turn([2, 3]))  # another answer to the same prompt
    made.add(ids(1, 2, 3, 4), turn([5]))
    assert [row.token_ids.tolist() for row in made.rows] == [[1, 2], [1, 2, 3, 4, 5]]
    assert made.rows[1].turns.tolist() == [-1, 1, 1, -1, 2]
    assert made.breaks == 1


def test_a_turn_needs_a_logprob_for_each_token() -> None:
    bad = GenerationResult("r7", ids(1, 2), torch.zeros(1), "stop", ())
    with pytest.raises(ValueError, match="request 'r7' has 2 tokens and 1 log-probabilities"):
        Trajectory().add(ids(1), bad)
