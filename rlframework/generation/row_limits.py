"""The most tokens of a row: up to a bound that its prompt has not yet reached."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

from rlframework.base.errors import RequestError
from rlframework.models.rotary import regime_limits


@dataclass(frozen=True)
class RowLimits:
    """The ascending lengths beyond which a row is computed otherwise, or, beyond the last, not at all.

    A rotary embedding with two regimes (longrope) computes all tokens of a row that exceeds its limit in another way,
    those before the limit too. Training would see other log-probabilities of these than those that they were sampled
    with, so no row crosses the limit: longer prompts are in the other regime from the beginning.
    """

    bounds: tuple[float, ...]

    @classmethod
    def of(cls, config: Any, max_tokens: int | None = None) -> RowLimits:
        """Return the limits of a model of `config`: those of its regimes, and its positions, at most `max_tokens`."""
        positions = getattr(config.get_text_config(), "max_position_embeddings", None) or -1  # XLNet has -1
        last = min(positions if positions > 0 else math.inf, max_tokens or math.inf)
        return cls((*(limit for limit in regime_limits(config) if limit < last), last))

    def regime(self, prompt: int) -> int:
        """Return which of the ways to compute rows is that of a prompt of `prompt` tokens, counted from 0."""
        return bisect_left(self.bounds, prompt)

    def room(self, request_id: str, prompt: int) -> float:
        """Return how many tokens can follow a prompt of `prompt` tokens, at least 1; raise `RequestError` for none."""
        last = self.bounds[-1]
        bound = min((bound for bound in self.bounds if bound >= prompt), default=last)
        if bound > prompt:
            return bound - prompt
        why = "positions" if bound == last else "positions until its rotary embeddings change"
        raise RequestError(
            f"the prompt of request {request_id!r} has {prompt} tokens, but the model has only {bound} {why}: shorten "
            "or remove such prompts"
        )
