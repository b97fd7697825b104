"""Rows that are decoded together: a token for each at every step; rows come and go between steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from rlframework.generation.sdk import Media, SamplingParams, choose, row_uniforms
from rlframework_transformers.media_rows import MediaRows
from rlframework_transformers.packed_rows import with_holes_filled
from rlframework_transformers.row_forward import Prefix, RowForward

_COMPACTION_RATIO = 4
"""Finished rows are removed once they are 1 / `_COMPACTION_RATIO` of the batch: moving the cache costs about a step."""

_CHECK_EVERY = 16
"""Steps between two looks at which rows are finished, on a device for which the host would have to wait."""


@dataclass(eq=False)
class Row:
    """A completion in progress, on the CPU.

    `budget`: its maximum number of tokens, at least 1. `tokens [t]`, `logprobs [t]`: those that it had when it joined a
    batch, and those that it has when it left one. `ended`: with a stop token. `prefix`: what is known of the first
    tokens when it joins a batch, and with `keep_prefix` of all but the last when it leaves one, where that is possible.
    `media`: the images of its prompt.
    """

    name: str
    prompt: Tensor
    seed: int
    budget: int
    tokens: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.int64))
    logprobs: Tensor = field(default_factory=lambda: torch.empty(0))
    ended: bool = False
    keep_prefix: bool = False
    prefix: Prefix | None = None
    media: Media | None = None

    @property
    def ids(self) -> Tensor:
        """The tokens of the prompt and those that follow it."""
        return torch.cat((self.prompt, self.tokens))

    @property
    def left(self) -> int:
        """The number of tokens that it can still get."""
        return self.budget - len(self.tokens)


class RowBatch:
    """Rows with the same sampling, on one `RowForward`. Computes no gradients, but does not use inference mode: a
    buffer that the model creates in it could not be used in training afterwards. `never`: tokens that are not chosen.
    """

    def __init__(
        self, forward: RowForward, sampling: SamplingParams, device: torch.device, never: Sequence[int] = ()
    ) -> None:
        self._forward, self._sampling, self._device = forward, sampling, device
        self._never = torch.tensor(list(never), dtype=torch.int64).to(device) if never else None
        self._stops = torch.tensor(sorted(sampling.stop_token_ids), dtype=torch.int64).to(device)
        self._check_every = 1 if device.type == "cpu" else _CHECK_EVERY
        self._steps_taken = 0
        self._clear()

    def _clear(self) -> None:
        device = self._device
        self._rows: list[Row | None] = []  # None: finished, but still computed
        self._logits = torch.zeros(0)
        self._tokens = torch.zeros(0, 0, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(0, 0, device=device)
        self._uniforms = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self._ended = torch.zeros(0, dtype=torch.bool, device=device)
        self._positions = torch.zeros(0, dtype=torch.int64, device=device)  # of the next tokens
        self._counts = self._budgets = torch.zeros(0, dtype=torch.int64)  # on the CPU: the same, and their limits

    @property
    def rows(self) -> list[Row]:
        """The unfinished rows."""
        return [row for row in self._rows if row is not None]

    def counts(self) -> list[tuple[Row, int]]:
        """Return the unfinished rows with their numbers of tokens, of which those after a stop token will be cut."""
        return [(row, count) for row, count in zip(self._rows, self._counts.tolist(), strict=True) if row is not None]

    def use(self, model: Any) -> None:
        """Go on with `model`, and the caches that there are."""
        self._forward.model = model

    def __len__(self) -> int:
        """Return the number of rows that are computed."""
        return len(self._rows)

    @torch.no_grad()
    def add(self, rows: Sequence[Row]) -> bool:
        """Compute the prompts of `rows`, with the tokens that they have; return False if they cannot join others."""
        prompts = [row.ids for row in rows]
        longest = max(row.left for row in rows)
        if isinstance(self._forward, MediaRows):
            self._forward.expect([row.media for row in rows])
        prefixes = [row.prefix for row in rows]
        begin = self._forward.join if self._rows else self._forward.start
        logits = begin(prompts, longest, prefixes)
        if logits is None:
            return False
        width = max(row.budget for row in rows)
        randoms = 0 if self._sampling.greedy else width
        uniforms = row_uniforms(torch.tensor([row.seed for row in rows]), randoms).to(self._device)
        tokens, logprobs = (
            torch.stack([nn.functional.pad(part, (0, width - len(part))) for part in parts]).to(self._device)
            for parts in ([row.tokens for row in rows], [row.logprobs for row in rows])
        )
        self._uniforms = _stacked(self._uniforms, uniforms)
        self._tokens, self._logprobs = _stacked(self._tokens, tokens), _stacked(self._logprobs, logprobs)
        self._logits = torch.cat((self._logits, logits)) if self._rows else logits
        self._ended = torch.cat((self._ended, torch.zeros(len(rows), dtype=torch.bool, device=self._device)))
        counts = torch.tensor([len(row.tokens) for row in rows])
        self._counts = torch.cat((self._counts, counts))
        self._positions = torch.cat((self._positions, counts.to(self._device)))
        self._budgets = torch.cat((self._budgets, torch.tensor([row.budget for row in rows])))
        self._rows.extend(rows)
        return True

    @torch.no_grad()
    def step(self) -> list[Row]:
        """Give each row a token; return the rows that are finished.

        On a CPU they are found after each token, elsewhere every 16, because the host has to wait for it.
        """
        numbers = torch.arange(len(self._rows), device=self._device)
        draws = None if self._sampling.greedy else self._uniforms[numbers, self._positions]
        chosen, logprobs = choose(self._logits, draws, self._sampling, self._never)
        self._tokens[numbers, self._positions], self._logprobs[numbers, self._positions] = chosen, logprobs
        self._positions, self._counts = self._positions + 1, self._counts + 1
        self._steps_taken += 1
        self._ended |= (chosen[:, None] == self._stops).any(-1)
        spent = self._counts >= self._budgets
        done = self._collect(spent) if self._steps_taken % self._check_every == 0 or bool(spent.any()) else []
        if self._rows:
            last = self._tokens.gather(1, self._positions[:, None] - 1).squeeze(1)
            self._logits = self._forward.advance(last)
        return done

    def remove(self, rows: Sequence[Row]) -> None:
        """Take unfinished `rows` out, with the tokens that they have."""
        leaving = {id(row) for row in rows}
        self._take([number for number, row in enumerate(self._rows) if row is not None and id(row) in leaving])
        self._compact(always=True)

    def _collect(self, spent: Tensor) -> list[Row]:
        """Return the rows that are finished now; those without budget leave the forward, others may stay for now."""
        over = (self._ended.cpu() | spent).tolist()
        rows = self._take([number for number, row in enumerate(self._rows) if row is not None and over[number]])
        self._compact(always=bool(spent.any()))
        return rows

    def _take(self, numbers: list[int]) -> list[Row]:
        """Give the rows of `numbers` their tokens, and forget them; they are computed until `_compact`."""
        if not numbers:
            return []
        places = torch.tensor(numbers).to(self._device)
        tokens, logprobs = self._tokens.index_select(0, places), self._logprobs.index_select(0, places).cpu()
        limits = self._counts[numbers]
        stops = torch.isin(tokens, self._stops).cpu() & (torch.arange(tokens.shape[1]) < limits[:, None])
        ended, tokens = stops.any(-1), tokens.cpu()
        lengths = torch.where(ended, stops.int().argmax(-1) + 1, limits).tolist()
        rows = []
        for place, number in enumerate(numbers):
            row, length = self._rows[number], lengths[place]
            assert row is not None
            if row.keep_prefix:
                row.prefix = self._forward.tokens_of(number)
            row.tokens, row.logprobs = tokens[place, :length].clone(), logprobs[place, :length].clone()
            row.ended, self._rows[number] = bool(ended[place]), None
            rows.append(row)
        return rows

    def _compact(self, *, always: bool) -> None:
        """Remove finished rows from the forward: all, or if they are many."""
        used = torch.tensor([row is not None for row in self._rows])
        unused = len(used) - int(used.sum())
        if not unused or not (always or self._forward.compact or unused * _COMPACTION_RATIO >= len(used)):
            return
        if unused == len(used):
            self._clear()
            return
        kept = with_holes_filled(used)
        self._rows = [self._rows[number] for number in kept.tolist()]
        self._counts, self._budgets = self._counts[kept], self._budgets[kept]
        self._forward.keep(kept)
        kept = kept.to(self._device)
        self._positions = self._positions[kept]
        self._tokens, self._logprobs, self._uniforms = self._tokens[kept], self._logprobs[kept], self._uniforms[kept]
        self._logits, self._ended = self._logits[kept], self._ended[kept]


def _stacked(upper: Tensor, lower: Tensor) -> Tensor:
    """Stack two matrices, of which the narrower is padded with zeros."""
    width = max(upper.shape[1], lower.shape[1])
    return torch.cat([nn.functional.pad(part, (0, width - part.shape[1])) for part in (upper, lower)])
