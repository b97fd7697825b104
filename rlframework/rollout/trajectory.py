"""The turns of an episode as training rows, with each sampled token and its log-probability as the engine returned it.

A turn's prompt that starts with all tokens and images of an existing row extends that row: what lies between is an
observation, not trained on. Any other prompt begins a row. No token is ever decoded, rendered or tokenised here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlframework.interfaces.generation import WeightSpan
from rlframework.interfaces.messages import Picture

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.interfaces.generation import GenerationResult


@dataclass(frozen=True, eq=False)
class TrainingRow:
    """One sequence to train on.

    `token_ids`: [T] int64. `token_mask`: [T] bool, true for tokens that were sampled here and are trained on.
    `logprobs`: [T] fp32, of the sampled tokens, 0 elsewhere. `spans`: the weights that sampled them, with positions in
    the row, in order. `turns`: [T] int64, the number of the turn that sampled the token, -1 elsewhere. `pictures`: the
    images of the row, in the order of their tokens.
    """

    token_ids: Tensor
    token_mask: Tensor
    logprobs: Tensor
    spans: tuple[WeightSpan, ...]
    turns: Tensor
    pictures: tuple[Picture, ...] = ()


@dataclass
class _Row:
    """A row that may grow: all its tokens and images, and where each of its turns starts."""

    token_ids: Tensor
    pictures: tuple[Picture, ...]
    turns: list[tuple[int, int, GenerationResult]]


class Trajectory:
    """The turns of an episode, or of an agent's session, as training rows. Sampled tokens are never rendered again.

    `turns`: how many were added. `breaks`: rows begun although there were rows.
    """

    def __init__(self) -> None:
        self._rows: list[_Row] = []
        self.turns = 0

    @property
    def breaks(self) -> int:
        """The rows that were begun although there were rows."""
        return max(len(self._rows) - 1, 0)

    @property
    def tokens(self) -> int:
        """The tokens of all rows."""
        return sum(len(row.token_ids) for row in self._rows)

    @property
    def rows(self) -> list[TrainingRow]:
        """The rows, in the order in which they were begun."""
        return [_training_row(row) for row in self._rows]

    def add(self, prompt_ids: Tensor, result: GenerationResult, pictures: Sequence[Picture] = ()) -> int:
        """Add the turn that completed `prompt_ids` ([P] int64) and return its number, counted from 0.

        `pictures`: the images of the prompt, in the order of their tokens. The turn extends the longest row with whose
        tokens and images the prompt starts; without one, it begins a row. Then the prompt is not trained on, even where
        it repeats sampled tokens of other rows: each is trained on once.

        Raises `ValueError` if `result` has not one log-probability per token.
        """
        import torch

        if len(result.token_ids) != len(result.logprobs):
            raise ValueError(
                f"request {result.request_id!r} has {len(result.token_ids)} tokens and {len(result.logprobs)} "
                "log-probabilities; a turn needs one of each per token"
            )
        extended = [
            row for row in self._rows if _starts_with(prompt_ids, row.token_ids) and _shows(pictures, row.pictures)
        ]
        row = max(extended, key=lambda row: len(row.token_ids), default=None)
        if row is None:
            row = _Row(prompt_ids, (), [])
            self._rows.append(row)
        row.turns.append((self.turns, len(prompt_ids), result))
        row.token_ids, row.pictures = torch.cat((prompt_ids, result.token_ids)), tuple(pictures)
        self.turns += 1
        return self.turns - 1


def _starts_with(prompt_ids: Tensor, row: Tensor) -> bool:
    return len(row) <= len(prompt_ids) and bool((prompt_ids[: len(row)] == row).all())


def _shows(pictures: Sequence[Picture], row: Sequence[Picture]) -> bool:
    """Whether `pictures` start with those of a row."""
    return len(row) <= len(pictures) and all(
        given.digest == known.digest for given, known in zip(pictures, row, strict=False)
    )


def _training_row(row: _Row) -> TrainingRow:
    import torch

    mask = torch.zeros(len(row.token_ids), dtype=torch.bool)
    logprobs = torch.zeros(len(row.token_ids), dtype=torch.float32)
    turns = torch.full((len(row.token_ids),), -1, dtype=torch.int64)
    spans: list[WeightSpan] = []
    for number, start, result in row.turns:
        sampled = slice(start, start + len(result.token_ids))
        mask[sampled], turns[sampled], logprobs[sampled] = True, number, result.logprobs
        spans += (WeightSpan(first + start, end + start, version) for first, end, version in result.spans)
    return TrainingRow(row.token_ids, mask, logprobs, tuple(spans), turns, row.pictures)
