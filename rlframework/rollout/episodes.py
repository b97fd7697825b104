"""The rollout manager: plays many episodes at once, turn by turn, on the generation client.

An episode that fails is left out; the others go on: see `EpisodePlayer`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from rlframework.base.errors import UserError
from rlframework.datasets.chat.chat_format import ChatFormat
from rlframework.generation.driver import run_in_loop
from rlframework.interfaces.environment import Sample
from rlframework.rollout.episode_player import EpisodePlayer
from rlframework.rollout.episode_thread import Bridge, gather_or_cancel, run_beside
from rlframework.rollout.result import PlayedEpisode, Rollout, rollout_of
from rlframework.rollout.seeds import task_seeds

if TYPE_CHECKING:
    from torch import Tensor

    from rlframework.config.sections import EnvironmentConfig
    from rlframework.rollout.parts import Parts

_LOG = logging.getLogger(__name__)

_SHOWN = 3
"""Different failures of a rollout that are logged."""


def play_episodes(
    parts: Parts, samples: Sequence[Sample], seeds: Tensor, *, temperature: float | None = None
) -> Rollout:
    """Play an episode of each of `samples`, with `seeds [E]` int64, and return their rows and scores.

    Its tokens depend on the sample, its seed, the weights and the environment, not on the other episodes; on these, the
    rounding of log-probabilities (and of a draw as close to the border of two tokens) depends. Raises `UserError` for
    what an environment must not return, and if all episodes have failed.
    """
    generation, config = parts.generation, parts.config.environment
    numbers: list[int] = seeds.tolist()
    tasks = list(zip(samples, numbers, task_seeds(samples, numbers), strict=True))
    at_once = config.max_concurrent_episodes or generation.client.limit * generation.client.lanes

    chat = ChatFormat(parts.tokenizer, parts.images)

    async def play(bridge: Bridge) -> list[PlayedEpisode]:
        player = EpisodePlayer(parts.environment, config, chat, bridge)
        pending, played = iter(enumerate(tasks)), dict[int, PlayedEpisode]()

        async def one_by_one() -> None:
            session = bridge.begin()
            for number, (sample, seed, task_seed) in pending:
                played[number] = await player.play(sample, seed, task_seed, session)
                ended, session = session, bridge.begin()  # before that one ends, so that the engines wait for it
                bridge.end(ended)
            bridge.end(session)

        await gather_or_cancel([one_by_one() for _ in range(min(at_once, len(tasks)))])
        return [played[number] for number in range(len(tasks))]

    async def serve() -> list[PlayedEpisode]:
        async with generation.completions(temperature=temperature, stop_token_ids=chat.turn_end_ids) as completions:
            bridge = Bridge(completions, config.gather_timeout)
            generation.client.gather = bridge.gather
            try:
                return await run_beside(partial(play, bridge), stalled_after=config.step_timeout, name=config.name)
            finally:
                generation.client.gather = None

    generation.prepare_for_generation()
    played = run_in_loop(serve())
    generation.finish_generation()  # not after a failure, as a second error would hide the first
    report_failures(played, config)
    return rollout_of(played, int(parts.tokenizer.pad_token_id), parts.images)


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
