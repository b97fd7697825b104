"""Rollouts by agents, whose attempts the plugin with the endpoint runs (`rlframework_agent_endpoint`)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import TYPE_CHECKING, Protocol

from rlframework.config.environments import AttemptsConfig
from rlframework.datasets.chat.chat_format import ChatFormat
from rlframework.generation.driver import run_in_loop
from rlframework.interfaces.environment import Sample
from rlframework.plugins.manager import load_from_plugin
from rlframework.rollout.episode_thread import Bridge, gather_or_cancel, run_beside
from rlframework.rollout.episodes import report_failures
from rlframework.rollout.result import PlayedEpisode, Rollout, rollout_of

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.rollout.parts import Parts


class AgentRunner(Protocol):
    """Runs the agent of the run's environment, once for each call of `play`."""

    async def play(self, sample: Sample, seed: int) -> PlayedEpisode:
        """Run the agent on `sample`; return its rows, or why it failed."""
        ...


def agent_runner(parts: Parts, bridge: Bridge) -> AbstractAsyncContextManager[AgentRunner]:
    """Return a context with the runner of the environment's agents, whose endpoint samples on `bridge`.

    Raises `PluginError` if no plugin has an endpoint.
    """
    key = f"environment.name={parts.config.environment.name}"
    runner = load_from_plugin(parts.config.plugins, "rlframework_agent_endpoint", key)
    context: AbstractAsyncContextManager[AgentRunner] = runner(parts, bridge)
    return context


def play_agents(parts: Parts, samples: Sequence[Sample], seeds: Tensor, *, temperature: float | None = None) -> Rollout:
    """Have the environment's agent attempt each of `samples`, with `seeds [E]` int64; return its rows and rewards.

    The tokens depend on the seed, the weights, and the requests, in any order: see `Session.seeds`.
    Raises `UserError` if all agents have failed.
    """
    generation, config = parts.generation, parts.config.environment
    assert isinstance(config, AttemptsConfig)
    client = generation.client
    at_once = config.max_concurrent_episodes or client.limit * client.lanes
    tasks = list(zip(samples, seeds.tolist(), strict=True))

    async def play(bridge: Bridge) -> list[PlayedEpisode]:
        room = asyncio.Semaphore(at_once)
        async with agent_runner(parts, bridge) as runner:

            async def one(sample: Sample, seed: int) -> PlayedEpisode:
                async with room:
                    return await runner.play(sample, seed)

            return await gather_or_cancel([one(*task) for task in tasks])

    async def serve() -> list[PlayedEpisode]:
        ends = ChatFormat(parts.tokenizer).turn_end_ids
        async with generation.completions(temperature=temperature, stop_token_ids=ends) as completions:
            bridge = Bridge(completions, config.gather_timeout)
            client.gather = bridge.gather
            try:
                return await run_beside(partial(play, bridge), stalled_after=config.step_timeout, name=config.name)
            finally:
                client.gather = None

    generation.prepare_for_generation()
    played = run_in_loop(serve())
    generation.finish_generation()  # not after a failure, as a second error would hide the first
    report_failures(played, config)
    return rollout_of(played, int(parts.tokenizer.pad_token_id), parts.images)
