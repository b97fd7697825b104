"""The requests that a model can serve."""

from __future__ import annotations

import math
import sys
from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlframework.base.errors import RequestError
from rlframework.huggingface.model_directories import first_size
from rlframework.interfaces.generation import GenerationRequest, SamplingParams
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


_LARGEST = sys.float_info.max


@dataclass(frozen=True)
class ServingLimits:
    """The `rows` and the `vocabulary` of a model; None: its configuration does not say.

    `no_media`: why requests may have no media, such as images; None if they may. `temperatures`: the lowest and highest
    that the engine takes besides 0.
    """

    rows: RowLimits
    vocabulary: int | None
    no_media: str | None = "this engine serves text only"
    temperatures: tuple[float, float] = (0.0, _LARGEST)

    @classmethod
    def of(cls, config: Any, max_tokens: int | None = None, image_kinds: Collection[str] = ()) -> ServingLimits:
        """Return the limits of a model of `config`, of whose positions an engine has at most `max_tokens`.

        `image_kinds`: the values of `model_type` for which the engine takes images.
        """
        limits = cls(RowLimits.of(config, max_tokens), first_size(config.get_text_config(), "vocab_size"))
        return replace(limits, no_media=None) if config.model_type in image_kinds else limits

    def top_k(self, request: GenerationRequest) -> int:
        """Return how many tokens the request samples from; 0: the whole vocabulary."""
        return min(request.sampling.top_k or 0, self.vocabulary or 2**31 - 1)

    def budget(self, request: GenerationRequest) -> int:
        """Return the most tokens of the completion."""
        return int(min(request.max_new_tokens, self.rows.room(request.request_id, len(request.prompt_ids))))


def check_requests(requests: Sequence[GenerationRequest], limits: ServingLimits, in_use: Collection[str]) -> None:
    """Raise `RequestError` as in `GenerationEngine.submit`; `in_use`: the ids of unfinished requests."""
    seen = set(in_use)
    for request in requests:
        name = request.request_id
        if name in seen:
            raise RequestError(f"request {name!r} was submitted before and is not finished; give each its own id")
        seen.add(name)
        if request.media and limits.no_media is not None:
            raise RequestError(f"request {name!r} has media; {limits.no_media}")
        _check_sampling(name, request.sampling, limits.temperatures)
        limits.budget(request)
    _check_tokens(requests, limits.vocabulary)


def _check_sampling(name: str, sampling: SamplingParams, temperatures: tuple[float, float]) -> None:
    (low, high), asked = temperatures, sampling.temperature
    some = f"0, or {low:g} to {high:g}" if high < _LARGEST else "0 or more"
    for key, given, right, allowed in (
        ("temperature", asked, asked == 0 or low <= asked <= high, some),
        ("top_k", sampling.top_k, sampling.top_k is None or sampling.top_k >= 1, "1 or more, or None"),
        ("top_p", sampling.top_p, 0 < sampling.top_p <= 1, "more than 0 and at most 1"),
    ):
        if not right:
            raise RequestError(f"request {name!r} has {key}={given}; it must be {allowed}")


def _check_tokens(requests: Sequence[GenerationRequest], vocabulary: int | None) -> None:
    most = float("inf") if vocabulary is None else vocabulary - 1
    for request in requests:
        stops = request.sampling.stop_token_ids
        if unknown := sorted(token for token in stops if not 0 <= token <= most):
            raise RequestError(
                f"request {request.request_id!r} has stop token {unknown[0]}; the model's tokens are 0 to {most}"
            )
        low, high = (int(end) for end in torch.aminmax(request.prompt_ids))
        if low < 0 or high > most:
            raise RequestError(
                f"the prompt of request {request.request_id!r} has token {low if low < 0 else high}; the model's "
                f"tokens are 0 to {most}"
            )
