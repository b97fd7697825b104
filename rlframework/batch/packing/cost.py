"""The cost of computing a row, in tokens and in pairs of tokens for attention; assigning bins to shards by cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlframework.batch.packing.lengths import Floats, read_count
from rlframework.errors import BatchError, BatchTypeError

DEFAULT_HIDDEN_SIZE = 2048
"""The hidden size of a typical model of 1B to 3B parameters; for others use `TokenCost.for_hidden_size`."""


@dataclass(frozen=True)
class TokenCost:
    """A row of `n` tokens costs `linear * n + attention * n * n`, in units of one token without its attention.

    In a transformer of hidden size `h`, the matrices of a layer take `24 h^2` operations per token, and causal
    attention over `n` tokens takes `2 h n` per token (Kaplan et al. 2020, arXiv:2001.08361, table 1): so `attention` is
    `1 / (12 h)`. Raises `BatchError` unless both are finite and not negative, and at least one is above 0.
    """

    linear: float = 1.0
    attention: float = 1.0 / (12 * DEFAULT_HIDDEN_SIZE)

    def __post_init__(self) -> None:
        for name, value in (("linear", self.linear), ("attention", self.attention)):
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise BatchTypeError(f"TokenCost.{name} must be a number, got {value!r}")
            if not (math.isfinite(value) and 0 <= value <= 1e30):
                raise BatchError(f"TokenCost.{name} must be a finite number from 0 to 1e30, got {value!r}")
        if max(self.linear, self.attention) < 1e-30:
            raise BatchError("TokenCost.linear and TokenCost.attention are both 0; at least one must be positive")

    @classmethod
    def for_hidden_size(cls, hidden: int) -> TokenCost:
        """Return the cost for a dense model of this hidden size."""
        return cls(attention=1.0 / (12 * read_count(hidden, "the hidden size", 1)))

    def of_rows(self, lengths: Any) -> Floats:
        """Return the costs `[n]` float64 of rows of `lengths [n]`, each of which attends only to itself."""
        tokens = np.asarray(lengths, dtype=np.float64)
        costs: Floats = (self.attention * tokens + self.linear) * tokens
        return costs

    def of_padded(self, count: int, width: int) -> float:
        """Return the cost of `count` rows padded to `width` tokens; padding costs as much as tokens."""
        return float(count) * (self.attention * width + self.linear) * width


def read_cost(cost: Any) -> TokenCost:
    """Return `cost`, or the default for None; raise `BatchTypeError` for anything else."""
    if cost is not None and not isinstance(cost, TokenCost):
        raise BatchTypeError(f"cost must be a TokenCost or None, got a {type(cost).__name__}")
    return cost or TokenCost()


def assign_by_cost(costs: Floats, shards: int) -> list[list[int]]:
    """Assign bins of `costs [bins]` to shards that run step by step together; return bin numbers, `[shard][step]`.

    The number of bins must be a multiple of `shards`. All shards wait for the costliest bin of a step, so each step
    gets bins that are adjacent in the order of cost, the costliest first. This minimizes the sum over the steps of
    their costliest bins. Within a step the costliest bin goes to the shard with the least cost so far, which keeps
    the totals of the shards alike.
    """
    order = np.argsort(-costs, kind="stable").reshape(-1, shards)
    totals = [0.0] * shards
    ranked = list(range(shards))  # the shards by ascending total
    takers: list[int] = []
    for values in costs[order].tolist():
        ranked.sort(key=totals.__getitem__)
        takers += ranked
        for shard, value in zip(ranked, values, strict=True):
            totals[shard] += value
    assigned = np.empty((shards, len(order)), dtype=np.int64)
    assigned[np.array(takers, dtype=np.int64).reshape(order.shape), np.arange(len(order))[:, None]] = order
    listed: list[list[int]] = assigned.tolist()
    return listed
