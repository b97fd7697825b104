"""Stand-in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rlframework.interfaces.generation import GenerationResult, WeightSpan


@dataclass(frozen=True, eq=False)
class TrainingRow:
    token_ids: Tensor
    token_mask: Tensor
    logprobs: Tensor
    spans: tuple[WeightSpan, ...]
    turns: Tensor


class Trajectory:
    def __init__(self) -> None:
        self.rows: list[TrainingRow] = []
        self.breaks = 0
        self.turns = 0

    @property
    def tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)

    def add(self, prompt_ids: Tensor, result: GenerationResult) -> int:
        best = None
        for number, row in enumerate(self.rows):
            size = len(row.token_ids)
            fits = size <= len(prompt_ids) and torch.equal(row.token_ids, prompt_ids[:size])
            if fits and (best is None or size > len(self.rows[best].token_ids)):
                best = number
        none = torch.empty(0, dtype=torch.int64)
        if best is None:
            self.breaks += bool(self.rows)
            old = TrainingRow(none, none.bool(), none.float(), (), none)
        else:
            old = self.rows[best]
        observed = prompt_ids[len(old.token_ids) :]
        new = len(result.token_ids)
        row = TrainingRow(
            torch.cat((prompt_ids, result.token_ids)),
            torch.cat((old.token_mask, torch.zeros(len(observed), dtype=torch.bool), torch.ones(new).bool())),
            torch.cat((old.logprobs, torch.zeros(len(observed)), result.logprobs)),
            old.spans + tuple(WeightSpan(s + len(prompt_ids), e + len(prompt_ids), v) for s, e, v in result.spans),
            torch.cat((old.turns, torch.full((len(observed),), -1), torch.full((new,), self.turns))),
        )
        if best is None:
            self.rows.append(row)
        else:
            self.rows[best] = row
        self.turns += 1
        return self.turns - 1
