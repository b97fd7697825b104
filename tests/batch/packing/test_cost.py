"""Costs of rows."""

from __future__ import annotations

import numpy as np
import pytest

from rlframework.base.errors import BatchError, BatchTypeError
from rlframework.batch.packing import TokenCost


def test_costs_by_hand():
    cost = TokenCost(2.0, 0.5)
    assert cost.of_rows([0, 1, 4]).tolist() == [0.0, 2.5, 16.0]
    assert cost.of_rows(np.array([4], np.int8)).dtype == np.float64


def test_attention_by_the_hidden_size():
    assert TokenCost.for_hidden_size(512) == TokenCost(1.0, 1 / 6144)
    assert TokenCost() == TokenCost.for_hidden_size(2048)
    with pytest.raises(BatchError, match="the hidden size must be at least 1"):
        TokenCost.for_hidden_size(0)


@pytest.mark.parametrize(
    ("linear", "attention", "error", "message"),
    [
        (-1.0, 0.0, BatchError, "linear must be a finite number"),
        (1.0, float("nan"), BatchError, "attention must be a finite number"),
        (float("inf"), 0.0, BatchError, "linear must be a finite number"),
        (0.0, 0.0, BatchError, "at least one must be positive"),
        ("1", 0.0, BatchTypeError, "linear must be a number"),
        (True, 0.0, BatchTypeError, "linear must be a number"),
    ],
)
def test_bad_costs_are_rejected(linear, attention, error, message):
    with pytest.raises(error, match=message):
        TokenCost(linear, attention)
