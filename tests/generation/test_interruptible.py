"""Completions that are interrupted for new weights, on a client whose tokens are numbers."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from rlframework.base.errors import WorkerLost
from rlframework.generation.interruptible import InterruptibleCompletions
from rlframework.generation.scheduler import MOST_LOSSES
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, SamplingParams, WeightSpan


class CountingClient:
    """Token `t` of a completion is the number of tokens before it; the log-probability is minus the weights' version.

    A token takes one turn of the event loop.
    """

    def __init__(self) -> None:
        self.version, self.losses, self.aborting = 1, 0, False
        self.requests: list[GenerationRequest] = []

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        self.requests.append(request)
        tokens = list[int]()
        while len(tokens) < request.max_new_tokens and not self.aborting:
            await asyncio.sleep(0)
            if self.losses:
                self.losses -= 1
                raise WorkerLost("the engine was lost")
            tokens.append(len(request.prompt_ids) + len(tokens))
        reason = "length" if len(tokens) == request.max_new_tokens else "aborted"
        spans = (WeightSpan(0, len(tokens), self.version),) if tokens else ()
        logprobs = torch.full((len(tokens),), -float(self.version))
        return GenerationResult(request.request_id, torch.tensor(tokens, dtype=torch.int64), logprobs, reason, spans)

    def interrupt(self) -> None:
        self.aborting = True

    async def drain(self) -> None:
        self.aborting = False


def completions(client: CountingClient) -> InterruptibleCompletions:
    given: Any = client
    return InterruptibleCompletions(given, SamplingParams(), max_new_tokens=8, positions=None)


async def turns(count: int) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def test_an_interrupted_completion_is_continued_with_the_new_weights() -> None:
    client = CountingClient()

    async def work() -> GenerationResult:
        found = completions(client)
        task = asyncio.create_task(found.complete([0, 1], 7, 8, "session"))
        await turns(4)
        await found.close(interrupt=True)
        assert not task.done()
        client.version = 2
        await found.open()
        return await task

    result = asyncio.run(work())
    first, second = client.requests
    begun = len(second.prompt_ids) - 2
    assert 0 < begun < 8
    assert result.token_ids.tolist() == list(range(2, 10))
    assert second.prompt_ids.tolist() == list(range(2 + begun))
    assert result.spans == (WeightSpan(0, begun, 1), WeightSpan(begun, 8, 2))
    assert result.logprobs.tolist() == [-1.0] * begun + [-2.0] * (8 - begun)
    assert result.finish_reason == "length"
    assert (second.max_new_tokens, second.session_id) == (8 - begun, "session")
    assert first.seed == 7
    assert second.seed not in (7, -1)
    assert 0 <= second.seed < 2**63


def test_draining_waits_for_the_requests_in_progress() -> None:
    client = CountingClient()

    async def work() -> GenerationResult:
        found = completions(client)
        task = asyncio.create_task(found.complete([0], 7, 8))
        await turns(3)
        await found.close(interrupt=False)
        late = asyncio.create_task(found.complete([0], 8, 8))
        await turns(30)
        assert len(client.requests) == 1  # nothing is sent while it is closed
        await found.open()
        await late
        return await task

    result = asyncio.run(work())
    assert result.spans == (WeightSpan(0, 8, 1),)
    assert len(client.requests) == 2


def test_a_lost_engine_is_waited_for_but_not_for_ever() -> None:
    client = CountingClient()
    client.losses = MOST_LOSSES - 1

    async def work(found: InterruptibleCompletions) -> GenerationResult:
        task = asyncio.create_task(found.complete([0], 7, 8))
        while not task.done():
            await turns(20)
            if found.lost:
                await found.open()
        return await task

    async def twice() -> GenerationResult:
        found = completions(client)
        await work(found)
        client.losses = MOST_LOSSES
        return await work(found)

    with pytest.raises(WorkerLost):
        asyncio.run(twice())
    assert len(client.requests) == 2 * MOST_LOSSES
