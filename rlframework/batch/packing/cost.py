"""What computing a row costs: a part for each token, and one for each pair of tokens that attention compares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlframework.batch.packing.lengths import Floats, read_count
from rlframework.errors import BatchError, BatchTypeError

DEFAULT_HIDDEN_SIZE = 2048
"""Of a model with one to three thousand million parameters; for others use `TokenCost.for_hidden_size`."""


@dataclass(frozen=True)
class TokenCost:
    """A row of `n` tokens costs `linear * n + attention * n * n`, in units of one token without its attention.

    In a transformer of hidden size `h` the matrices of a layer take `24 h^2` operations a token, causal attention over
    `n` tokens `2 h n` a token (Kaplan et al. 2020, arXiv:2001.08361, table 1): so `attention` is `1 / (12 h)`.
    Both must be finite and not negative, and not both 0: `BatchError`.
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
            raise BatchError("TokenCost needs a linear or an attention part above 0")

    @classmethod
    def for_hidden_size(cls, hidden: int) -> TokenCost:
        """The cost of a dense model of this hidden size."""
        return cls(attention=1.0 / (12 * read_count(hidden, "the hidden size", 1)))

    def of_rows(self, lengths: Any) -> Floats:
        """Costs of rows of `lengths [n]`, each attending to itself only, as float64 `[n]`."""
        tokens = np.asarray(lengths, dtype=np.float64)
        costs: Floats = (self.attention * tokens + self.linear) * tokens
        return costs

    def of_padded(self, count: int, width: int) -> float:
        """Cost of `count` rows padded to `width` tokens: padding is computed like tokens."""
        return float(count) * (self.attention * width + self.linear) * width


def read_cost(cost: Any) -> TokenCost:
    """`cost`, or the default for None; `BatchTypeError` for anything else."""
    if cost is not None and not isinstance(cost, TokenCost):
        raise BatchTypeError(f"cost must be a TokenCost or None, got a {type(cost).__name__}")
    return cost or TokenCost()
