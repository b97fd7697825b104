"""The driver of synchronous rollouts: all groups are played at once, and the last one is waited for."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, TypeVar

from rlframework.generation.driver import run_in_loop
from rlframework.interfaces.environment import Sample
from rlframework.rollout.episode_thread import Bridge, gather_or_cancel, play_beside

if TYPE_CHECKING:
    from rlframework.rollout.group_players import GroupPlayer
    from rlframework.rollout.result import Rollout

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
