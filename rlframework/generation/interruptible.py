"""Completions that are interrupted when the engines get new weights, and continued with these."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from rlframework.base.errors import WorkerLost
from rlframework.generation.completions import Completions
from rlframework.generation.scheduler import MOST_LOSSES
from rlframework.interfaces.generation import FinishReason, GenerationResult, SamplingParams, WeightSpan

_CONTINUED = 2**33
"""In a seed, before the number of tokens after which a completion is continued: beyond the numbers of turns."""


class InterruptibleCompletions(Completions):
    """Completes prompts with weights that may change meanwhile, which the spans of a result say.

    While closed, no request is sent. Requests whose engines are all lost wait for `open` too, after `lost` is set.
    """

    several_versions: ClassVar[bool] = True

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        """See `Completions`. Open at first."""
        super().__init__(*arguments, **keywords)
        self.lost = False
        """Whether a request waits because all engines are lost. Set to False when they are replaced."""
        self._inside = 0
        self._opened, self._left = asyncio.Event(), asyncio.Event()
        self._opened.set()

    async def close(self, *, interrupt: bool) -> None:
        """Wait until the engines have no requests: ended where they are with `interrupt`, otherwise complete."""
        self._opened.clear()
        if interrupt:
            self._client.interrupt()
        while self._inside:
            self._left.clear()
            await self._left.wait()
        await self._client.drain()

    async def open(self) -> None:
        """Send requests again, first of all what is left of those that were interrupted."""
        self.lost = False
        self._opened.set()

    async def complete(
        self,
        prompt_ids: Sequence[int] | Tensor,
        seed: int,
        max_new_tokens: int,
        session_id: str | None = None,
        sampling: SamplingParams | None = None,
        media: Mapping[str, Tensor] | None = None,
    ) -> GenerationResult:
        """See `Completions.complete`. A prompt whose engine is lost for the third time fails with `WorkerLost`."""
        progress, losses = _Progress(torch.as_tensor(prompt_ids, dtype=torch.int64), max_new_tokens), 0
        while True:
            await self._opened.wait()
            self._inside += 1
            try:
                result = await super().complete(
                    progress.ids, progress.seed(seed), progress.left, session_id, sampling, media
                )
            except WorkerLost:
                losses += 1
                if losses == MOST_LOSSES:
                    raise
                self.lost = True
                self._opened.clear()
                continue
            finally:
                self._inside -= 1
                self._left.set()
            progress.results.append(result)
            if result.finish_reason != "aborted" or not progress.left:
                return progress.joined()


@dataclass(eq=False)
class _Progress:
    """A completion of `prompt` in several parts, of at most `budget` tokens."""

    prompt: Tensor
    budget: int
    results: list[GenerationResult] = field(default_factory=list)

    @property
    def ids(self) -> Tensor:
        return torch.cat((self.prompt, *(result.token_ids for result in self.results))) if self.results else self.prompt

    @property
    def left(self) -> int:
        return self.budget - sum(len(result.token_ids) for result in self.results)

    def seed(self, seed: int) -> int:
        """Return the seed of the next part: of its own, as an engine counts the tokens of each request from 0."""
        sampled = self.budget - self.left
        if not sampled:
            return seed
        return int(np.random.SeedSequence([seed, _CONTINUED + sampled]).generate_state(1, np.uint64)[0] >> 2)

    def joined(self) -> GenerationResult:
        """Return the parts as one result."""
        last = self.results[-1]
        if len(self.results) == 1:
            return last
        spans, start = list[WeightSpan](), 0
        for result in self.results:
            spans += (WeightSpan(start + span.start, start + span.end, span.version) for span in result.spans)
            start += len(result.token_ids)
        reason: FinishReason = "length" if last.finish_reason == "aborted" else last.finish_reason
        ids = torch.cat([result.token_ids for result in self.results])
        logprobs = torch.cat([result.logprobs for result in self.results])
        return GenerationResult(last.request_id, ids, logprobs, reason, tuple(spans))
