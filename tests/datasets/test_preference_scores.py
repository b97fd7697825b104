"""Scores of preference pairs: numbers of any type become fp32, and anything else is an error."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlframework.datasets.preferences import PreferencePairs, PreferenceRow
from rlframework.errors import DataError
from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.environment import Message

ASKED: Message = {"role": "user", "content": "a"}


def scored(*scores: Any) -> PreferencePairs:
    rows = [PreferenceRow((ASKED,), "b", "c", id=f"r{n}", scores=one) for n, one in enumerate(scores)]
    return PreferencePairs.from_rows(rows, character_tokenizer("abc"))


def test_scores_are_fp32_whatever_numbers_they_are() -> None:
    for pairs in (scored((1, 0), (2, -1)), scored((1.0, 0), (2, -1.0)), scored((True, False), [2, -1])):
        assert pairs.chosen.end_scores.tolist() == [1.0, 2.0]
        assert pairs.rejected.end_scores.tolist() == [0.0, -1.0]
        assert pairs.chosen.end_scores.dtype == pairs.rejected.end_scores.dtype == torch.float32


@pytest.mark.parametrize(
    "bad",
    [(None, 1), (float("nan"), 1.0), (1.0, float("inf")), (1e39, 0.0), (10**400, 0), ("1", 0), (1.0,), (1, 2, 3), 5],
)
def test_scores_that_are_none(bad: Any) -> None:
    with pytest.raises(DataError, match=r"pair 1 \(r1\) has scores .*give two finite numbers"):
        scored((1.0, 0.0), bad)
