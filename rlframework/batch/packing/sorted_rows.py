"""The rows that are to be put into bins, by descending length."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from rlframework.batch.packing.cost import TokenCost
from rlframework.batch.packing.lengths import Floats, Ints, sort_descending


class Rows:
    """Rows of `lengths [n]`: the numbers of those above 0 by descending length, and what they cost."""

    def __init__(self, lengths: Ints, cost: TokenCost) -> None:
        ordered = sort_descending(lengths)
        self.by_number = lengths
        self.numbers = ordered[: np.count_nonzero(lengths)]
        self.empty: list[int] = ordered[len(self.numbers) :].tolist()
        self.lengths = lengths[self.numbers]
        self.cost = cost

    def __len__(self) -> int:
        return len(self.numbers)

    @cached_property
    def costs(self) -> Floats:
        """Costs of the rows, in their order."""
        return self.cost.of_rows(self.lengths)

    @cached_property
    def tokens(self) -> int:
        """All tokens."""
        return int(self.lengths.sum())

    @cached_property
    def unit(self) -> int:
        """The greatest divisor of all lengths: above 1 where rows are padded to a multiple."""
        some = int(np.gcd.reduce(self.lengths[:64]))
        return some if some == 1 else int(np.gcd.reduce(self.lengths))
