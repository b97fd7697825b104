"""The player of agents, whose attempts the plugin with the endpoint runs (`rlframework_agent_endpoint`)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Protocol

from rlframework.interfaces.environment import Sample
from rlframework.plugins.manager import load_from_plugin
from rlframework.rollout.episode_thread import Bridge
from rlframework.rollout.episodes import PlayOne, SeveralTurnsPlayer
from rlframework.rollout.result import PlayedEpisode


class AgentRunner(Protocol):
    """Runs the agent of the run's environment, once for each call of `play`."""

    async def play(self, sample: Sample, seed: int) -> PlayedEpisode:
        """Run the agent on `sample`; return its rows, or why it failed."""
        ...


class AgentsPlayer(SeveralTurnsPlayer):
    """Has the environment's agent attempt samples, against an endpoint that is served meanwhile.

    The tokens depend on the seed, the weights, and the requests, in any order: see `Session.seeds`.
    """

    @asynccontextmanager
    async def _player(self, bridge: Bridge) -> AsyncIterator[PlayOne]:
        key = f"environment.name={self.parts.config.environment.name}"
        runner_for = load_from_plugin(self.parts.config.plugins, "rlframework_agent_endpoint", key)
        runner: AgentRunner
        async with runner_for(self.parts, bridge) as runner:

            async def play(sample: Sample, seed: int, _task_seed: int) -> PlayedEpisode:
                async with self._room:
                    return await runner.play(sample, seed)

            yield play
