"""Which of the rows decoded together share prompts, and their queries arranged by prompt."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class SharedPrompts:
    """Which rows share prompts of `lengths`: `slots [n]` are those of the rows, -1 for rows that have none.

    The queries of a prompt's rows are adjacent in `[d, m]`, where `m` is the largest number of rows of a prompt;
    `places` are those of the rows `sharing`. `given [n]`: the length of each row's prompt in a slot.
    """

    def __init__(self, lengths: Sequence[int], slots: Tensor) -> None:
        self.lengths, self.count = torch.tensor(lengths, dtype=torch.int64), len(lengths)
        self.given = torch.cat((self.lengths, torch.zeros(1, dtype=torch.int64)))[slots]
        if not lengths:
            return
        self.equal = min(lengths) == max(lengths)
        self.rows, self.sharing = len(slots), (slots >= 0).nonzero()[:, 0]
        slots = slots[self.sharing]
        order = torch.argsort(slots, stable=True)
        counts = torch.bincount(slots, minlength=self.count)
        firsts = counts.cumsum(0) - counts
        ranks = torch.empty_like(slots)
        ranks[order] = torch.arange(len(slots)) - firsts[slots[order]]
        self.most = int(counts.max())
        self.places = slots * self.most + ranks
        self.trivial = torch.equal(self.places, torch.arange(self.count * self.most)) and len(slots) == self.rows
        self.longest = int(self.lengths.max())

    def gathered(self, rows: Tensor) -> Tensor:
        """Arrange `rows [n, ...]` as `[d, m, ...]`, with zeros between them."""
        if not self.trivial:
            spread = rows.new_zeros(self.count * self.most, *rows.shape[1:])
            rows = spread.index_copy_(0, self.places, rows[self.sharing])
        arranged: Tensor = rows.unflatten(0, (self.count, self.most))
        return arranged

    def scattered(self, gathered: Tensor, absent: float) -> Tensor:
        """Invert `gathered`; rows without a prompt in a slot are filled with `absent`."""
        rows = gathered.flatten(0, 1)
        if self.trivial:
            return rows
        spread = rows.new_full((self.rows, *rows.shape[1:]), absent)
        return spread.index_copy_(0, self.sharing, rows[self.places])
