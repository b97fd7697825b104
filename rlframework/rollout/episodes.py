"""Players of several turns (episodes of an environment, and agents), and the driver that waits for all of them."""

from __future__ import annotations

import asyncio
import logging
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from rlframework.base.errors import UserError
from rlframework.datasets.chat.chat_format import ChatFormat
from rlframework.generation.driver import run_in_loop
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.generation import WeightSpan
from rlframework.plugins.manager import load_from_plugin
from rlframework.rollout.episode_player import EpisodePlayer
from rlframework.rollout.episode_thread import Bridge, gather_or_cancel, play_beside
from rlframework.rollout.group_players import GroupPlayer
from rlframework.rollout.result import PlayedEpisode, Rollout, rollout_of
from rlframework.rollout.seeds import task_seeds

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.config.sections import EnvironmentConfig
    from rlframework.rollout.group_players import GroupPlayer
    from rlframework.rollout.parts import Parts
    from rlframework.rollout.result import Rollout

_LOG = logging.getLogger(__name__)

_SHOWN = 3
"""Different failures of a rollout that are logged."""

PlayOne = Callable[[Sample, int, int], Coroutine[Any, Any, PlayedEpisode]]
"""Plays a sample with its seed and the seed of its environment."""


class SeveralTurnsPlayer(GroupPlayer[list[PlayedEpisode]]):
    """Plays what has several turns; a group is the episodes of one sample."""

    def __init__(self, parts: Parts) -> None:
        super().__init__(parts)
        self._chat = ChatFormat(parts.tokenizer, parts.images)
        self.stop_token_ids = frozenset(self._chat.turn_end_ids)

    @asynccontextmanager
    async def playing(self, bridge: Bridge) -> AsyncIterator[None]:
        """See `GroupPlayer.playing`."""
        config, client = self.parts.config.environment, self.parts.generation.client
        self._room = asyncio.Semaphore(config.max_concurrent_episodes or client.limit * client.lanes)
        async with self._player(bridge) as self._play_one:
            yield

    @abstractmethod
    def _player(self, bridge: Bridge) -> AbstractAsyncContextManager[PlayOne]:
        """Return a context with the function that plays an episode when `_room` has a place for it."""

    async def play(self, sample: Sample, seeds: Sequence[int]) -> list[PlayedEpisode]:
        """See `GroupPlayer.play`."""
        tasks = task_seeds([sample] * len(seeds), seeds)
        return await gather_or_cancel([self._play_one(sample, *each) for each in zip(seeds, tasks, strict=True)])

    def play_all(self, samples: Sequence[Sample], seeds: Tensor, *, temperature: float | None = None) -> Rollout:
        """See `GroupPlayer.play_all`. Adjacent episodes of a sample are a group, so that they begin with the same task.

        An episode's tokens depend on its sample, its seed, the weights and the environment, not on other episodes; on
        these, the rounding of log-probabilities (and of a draw as close to the border of two tokens) depends. Raises
        `UserError` for what an environment must not return, and if all episodes have failed.
        """
        return play_groups(self, samples, seeds.tolist(), temperature)

    def spans(self, group: list[PlayedEpisode]) -> Iterable[WeightSpan]:
        """See `GroupPlayer.spans`."""
        return (span for episode in group for row in episode.rows for span in row.spans)

    def rollout(self, groups: Sequence[tuple[Sample, int, list[PlayedEpisode] | str]]) -> Rollout:
        """See `GroupPlayer.rollout`."""
        complete = [episode for *_, group in groups if not isinstance(group, str) for episode in group]
        report_failures(complete, self.parts.config.environment)
        played = list[PlayedEpisode]()
        for sample, rows, group in groups:
            failed = [PlayedEpisode(sample, (), (), (), failure=group)] * rows if isinstance(group, str) else group
            played += failed
        return rollout_of(played, self.pad_id, self.parts.images)


class EpisodesPlayer(SeveralTurnsPlayer):
    """Plays episodes of the environment."""

    @asynccontextmanager
    async def _player(self, bridge: Bridge) -> AsyncIterator[PlayOne]:
        player = EpisodePlayer(self.parts.environment, self.parts.config.environment, self._chat, bridge)

        async def play(sample: Sample, seed: int, task_seed: int) -> PlayedEpisode:
            await self._room.acquire()
            session = bridge.begin()
            try:
                return await player.play(sample, seed, task_seed, session)
            finally:
                self._room.release()  # now, so that who waits has begun when this ends, and the engines wait for it
                asyncio.get_running_loop().call_soon(bridge.end, session)

        yield play


def report_failures(played: Sequence[PlayedEpisode], config: EnvironmentConfig) -> None:
    """Log failed episodes; raise `UserError` if all, or more than `max_failed_episodes`, have failed."""
    failed = [episode for episode in played if episode.failure]
    if not failed:
        return
    first = f"sample {failed[0].sample.id!r}: {failed[0].failure}"
    allowed, all_failed = config.max_failed_episodes, len(failed) == len(played)
    if all_failed or len(failed) > allowed * len(played):
        traceback = f"\n{failed[0].traceback}" if failed[0].traceback else ""
        count = f"all {len(played)}" if all_failed else f"{len(failed)} of {len(played)}"
        limit = "" if all_failed else f", which is more than environment.max_failed_episodes={allowed:g} allows"
        raise UserError(
            f"{count} episodes of environment {config.name!r} failed{limit}; the first, of {first}{traceback}"
        )
    _LOG.warning(
        "%d of %d episodes of environment %r failed, and nothing is learned from them; the first, of %s",
        len(failed), len(played), config.name, first,
    )  # fmt: skip
    others = {episode.failure: episode for episode in failed if episode.failure != failed[0].failure}
    for episode in list(others.values())[: _SHOWN - 1]:
        _LOG.warning("another failed episode, of sample %r: %s", episode.sample.id, episode.failure)


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


G = TypeVar("G")


def play_groups(
    player: GroupPlayer[G], samples: Sequence[Sample], seeds: Sequence[int], temperature: float | None
) -> Rollout:
    """Have `player` play each of `samples` with its seed, adjacent ones that are the same as a group.

    Engines wait for episodes that are at their environment, see `Bridge`. `temperature`: None for that of the run.
    """
    generation, config = player.parts.generation, player.parts.config.environment
    pairs = groupby(zip(samples, seeds, strict=True), key=lambda pair: id(pair[0]))
    groups = [list(group) for _, group in pairs]

    async def play(bridge: Bridge) -> list[G]:
        async with player.playing(bridge):
            return await gather_or_cancel([player.play(group[0][0], [seed for _, seed in group]) for group in groups])

    async def serve() -> list[G]:
        stops = player.stop_token_ids
        async with generation.completions(temperature=temperature, stop_token_ids=stops) as completions:
            return await play_beside(play, completions, generation.client, config, gathered=True)

    generation.prepare_for_generation()
    played = run_in_loop(serve())
    generation.finish_generation()  # not after a failure, as a second error would hide the first
    return player.rollout([(group[0][0], len(group), each) for group, each in zip(groups, played, strict=True)])
