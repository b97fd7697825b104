"""Serve a model at the endpoint until the process is asked to end."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from rlframework.datasets.chat.chat_format import ChatFormat
from rlframework.generation.driver import run_in_loop
from rlframework.rollout.episode_thread import Bridge, run_beside
from rlframework_serve.completions import PromptScorer
from rlframework_serve.conversations import EngineSessions
from rlframework_serve.sampling import Sampler, SamplingRule
from rlframework_serve.server import Endpoint, served
from rlframework_serve.sessions import Session

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.sections import ImagesConfig
    from rlframework.datasets.image_inputs import ImageInputs
    from rlframework.generation.driver import Generation
    from rlframework.policy.client import Policy

_PATIENCE = 60.0
"""Seconds for which the server's event loop may stand still."""


def serve(
    tokenizer: PreTrainedTokenizerBase,
    generation: Generation,
    *,
    model: str,
    token: str,
    host: str,
    port: int,
    started: Callable[[str], None],
    policy: Policy | None = None,
    images: tuple[ImagesConfig, ImageInputs] | None = None,
) -> None:
    """Serve `generation` to clients with the bearer token `token`; `started(base_url)` is called once it is ready.

    `images`: how to read the images of requests, and what makes inputs of the model from them; None: text only.
    `policy`: scores prompts, if it is in this process; others are busy with their engines. Returns
    after SIGINT or SIGTERM. Nothing that clients send is kept.
    """

    async def answer(bridge: Bridge, rule: SamplingRule, scorer: PromptScorer | None) -> None:
        section, inputs = images or (None, None)
        endpoint = Endpoint(Sampler(tokenizer, bridge, rule, images=inputs), model, scorer=scorer, images=section)
        session = shared_session(bridge, token)
        async with served(endpoint, host, port) as base_url:
            endpoint.sessions.open(session)
            started(base_url)
            try:
                await asyncio.Event().wait()
            finally:
                endpoint.sessions.close(session)

    async def run() -> None:
        async with generation.completions(stop_token_ids=ChatFormat(tokenizer).turn_end_ids) as completions:
            rule = SamplingRule(completions.sampling, completions.sampling, "allow")
            scorer = None
            if policy is not None and policy.config.worker_group.name == "inline":
                scorer = PromptScorer(policy, tokenizer, asyncio.get_running_loop())
            work = partial(answer, Bridge(completions, timeout=0.0), rule, scorer)
            task = asyncio.ensure_future(run_beside(work, stalled_after=_PATIENCE, name="serve"))
            with _until_signal(task):
                await asyncio.wait({task})
            if not task.cancelled():
                task.result()

    generation.prepare_for_generation()
    run_in_loop(run())
    generation.finish_generation()


def shared_session(bridge: Bridge, token: str) -> Session:
    """Return the session of all clients: nothing is recorded, and each conversation has a session of the engines."""
    return Session(bridge.begin(), record=False, token=token, engine_sessions=EngineSessions(bridge.begin))


@contextmanager
def _until_signal(task: asyncio.Task[None]) -> Iterator[None]:
    """Context in which SIGINT and SIGTERM cancel `task`. To be used in the main thread."""
    loop, signals = asyncio.get_running_loop(), (signal.SIGINT, signal.SIGTERM)
    for number in signals:
        loop.add_signal_handler(number, task.cancel)
    try:
        yield
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
