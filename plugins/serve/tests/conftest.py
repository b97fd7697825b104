"""A served endpoint in front of a scripted completer, and OpenAI's client for it."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from rlframework.huggingface.tokenizer import character_tokenizer
from rlframework.interfaces.generation import GenerationResult, SamplingParams, WeightSpan
from rlframework_serve.sampling import Sampler, SamplingRule
from rlframework_serve.server import Endpoint, served
from rlframework_serve.sessions import Session

ALPHABET = "".join(map(chr, range(32, 127))) + "\n"


class Completer:
    """Answers with the texts of `answers`, in turn, and an end token; log-probabilities are -1, -2, ..."""

    positions, max_new_tokens = 2000, 500

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.answers, self.asked = tokenizer, ["hello"], list[Any]()
        self.waits: asyncio.Event | None = None
        self.media = list[Any]()
        self.aborted = 0

    async def complete(
        self,
        prompt_ids: Any,
        seed: int,
        max_new_tokens: int,
        session: str,
        sampling: SamplingParams | None = None,
        *,
        media: Any = None,
    ) -> GenerationResult:
        self.media.append(media)
        self.asked.append((list(map(int, prompt_ids)), seed, max_new_tokens, sampling))
        answer = self.answers[(len(self.asked) - 1) % len(self.answers)]
        if self.waits is not None:
            try:
                await self.waits.wait()
            except asyncio.CancelledError:
                self.aborted += 1
                raise
        ids = [*self.tokenizer(answer, add_special_tokens=False)["input_ids"], self.tokenizer.eos_token_id]
        reason: Any = "stop" if len(ids) <= max_new_tokens else "length"
        ids = ids[:max_new_tokens]
        logprobs = -torch.arange(1, len(ids) + 1).float()
        return GenerationResult("r", torch.tensor(ids), logprobs, reason, (WeightSpan(0, len(ids), 3),))


@dataclass
class Served:
    """An endpoint that is served at `base_url`, with one open `session`."""

    endpoint: Endpoint
    completer: Completer
    session: Session
    base_url: str

    def client(self, **options: Any) -> Any:
        from openai import AsyncOpenAI

        return AsyncOpenAI(**{"base_url": self.base_url, "api_key": self.session.token, "max_retries": 0, **options})

    async def send(self, path: str, content: Any, method: str = "POST", **headers: str) -> Any:
        """The answer to a request for `path` below `/v1`; a dictionary is sent as JSON."""
        import httpx

        content = json.dumps(content) if isinstance(content, dict) else content
        async with httpx.AsyncClient(trust_env=False) as client:
            sent = {"Authorization": f"Bearer {self.session.token}", **headers}
            return await client.request(method, f"{self.base_url}{path}", content=content, headers=sent)

    def address(self) -> tuple[str, int]:
        return "127.0.0.1", int(self.base_url.split(":")[2].split("/")[0])


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: Any) -> bool | None:
    """Run the coroutine of an `async def` test, in the loop of `served` if it has that."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    arguments = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    loop = pyfuncitem.funcargs.get("loop")
    (loop.run if loop else asyncio.run)(pyfuncitem.obj(**arguments))
    return True


@pytest.fixture
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(name="served")
def served_without_options(serving: Any, loop: asyncio.Runner) -> Iterator[Served]:
    """An endpoint without options."""
    context = serving()
    yield loop.run(context.__aenter__())
    loop.run(context.__aexit__(None, None, None))


@pytest.fixture
def client(served: Served, loop: asyncio.Runner) -> Iterator[Any]:
    """OpenAI's client of `served`."""
    made = served.client()
    yield made
    loop.run(made.close())


@pytest.fixture
def serving() -> Callable[..., Any]:
    """`async with serving(max_turns=...) as served`: a `Served`."""

    @asynccontextmanager
    async def start(
        foreign: Any = "reject", max_body: int = 100_000, vision: Any = None, **options: Any
    ) -> AsyncIterator[Served]:
        """`vision`: tokenizer, `ImagesConfig` and `ImageInputs` of a model that takes images."""
        tokenizer, section, inputs = vision or (character_tokenizer(ALPHABET), None, None)
        completer = Completer(tokenizer)
        rule = SamplingRule(SamplingParams(), SamplingParams(), foreign)
        endpoint = Endpoint(
            Sampler(tokenizer, completer, rule, images=inputs), "policy", max_body=max_body, images=section
        )
        session = endpoint.sessions.open(Session("engine", **{"seed": 5, **options}))
        async with served(endpoint) as base_url:
            yield Served(endpoint, completer, session, base_url)

    return start
