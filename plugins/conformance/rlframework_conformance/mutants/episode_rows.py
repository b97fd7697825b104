"""Broken rollouts of episodes: rows that are not what the engine sampled, lost rewards, episodes left open.

The environment's attribute `player` replaces the rollout manager's; see `recorded_rollout`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlframework.interfaces.environment import Episode, StepOutcome
from rlframework.plugins.types import Capability
from rlframework.rollout.episode_player import EpisodePlayer
from rlframework.rollout.result import PlayedEpisode
from rlframework.rollout.trajectory import TrainingRow
from rlframework_conformance.mutants.mutant import around, mutant

_NEEDS = frozenset({Capability.EPISODES})


def _player(*methods: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[[Any], Any]]:
    """Decorate `change(call, player, ...)`, which runs in position of `methods` of the `EpisodePlayer`."""

    def decorate(change: Callable[..., Any]) -> Callable[[Any], Any]:
        player = around(*methods)(change)(EpisodePlayer)
        return lambda part: type("Broken", (part,), {"player": player})

    return decorate


def _rows(change: Callable[[TrainingRow], TrainingRow]) -> Callable[[Any], Any]:
    """Decorate a change of each row that is played."""

    @_player(EpisodePlayer.play)
    async def play(call: Any, _: Any, *task: Any) -> Any:
        played = await call(*task)
        return replace(played, rows=[change(row) for row in played.rows])

    return play


@mutant("observations_trained", "The mask covers observations and tool results too.", needs=_NEEDS)
@_rows
def _observations_trained(row: TrainingRow) -> TrainingRow:
    first = int(row.token_mask.nonzero()[0])
    mask = row.token_mask.clone()
    mask[first:] = True
    return replace(row, token_mask=mask)


@mutant("prompt_trained", "The mask covers the last token of the first prompt.", needs=_NEEDS)
@_rows
def _prompt_trained(row: TrainingRow) -> TrainingRow:
    mask = row.token_mask.clone()
    mask[int(mask.nonzero()[0]) - 1] = True
    return replace(row, token_mask=mask)


@mutant("end_left_out", "The token that ends a turn is not trained on.", needs=_NEEDS)
@_rows
def _end_left_out(row: TrainingRow) -> TrainingRow:
    following = torch.cat((row.token_mask[1:], torch.zeros(1, dtype=torch.bool)))
    return replace(row, token_mask=row.token_mask & following, logprobs=row.logprobs * following)


@mutant("tokenised_again", "One sampled token is another, as after rendering the turn again.", needs=_NEEDS)
@_rows
def _tokenised_again(row: TrainingRow) -> TrainingRow:
    ids = row.token_ids.clone()
    position = int(row.token_mask.nonzero()[0])
    ids[position] = 3 + (int(ids[position]) - 2) % 256
    return replace(row, token_ids=ids)


@mutant("logprobs_shifted", "Log-probabilities are one position late.", needs=_NEEDS)
@_rows
def _logprobs_shifted(row: TrainingRow) -> TrainingRow:
    return replace(row, logprobs=row.logprobs.roll(1) * row.token_mask)


@mutant("tool_results_reworded", "A row has another observation than was sampled after.", needs=_NEEDS)
@_rows
def _tool_results_reworded(row: TrainingRow) -> TrainingRow:
    ids = row.token_ids.clone()
    position = int(row.token_mask.nonzero()[0]) - 1
    ids[position] = 3 + (int(ids[position]) - 2) % 256
    return replace(row, token_ids=ids)


@mutant("tool_result_as_sampled", "Tokens of observations count as sampled ones.", needs=_NEEDS)
@_player(EpisodePlayer.play)
async def _tool_result_as_sampled(play: Any, _: Any, *task: Any) -> Any:
    class Counted(PlayedEpisode):
        @property
        def sampled(self) -> int:
            return sum(len(row.token_ids) - int(row.token_mask.nonzero()[0]) for row in self.rows)

    return Counted(**vars(await play(*task)))


@mutant("reward_of_the_last_turn", "Only the last turn's reward is kept.", needs=_NEEDS)
@_player(EpisodePlayer.play)
async def _reward_of_the_last_turn(play: Any, _: Any, *task: Any) -> Any:
    played = await play(*task)
    return replace(played, outcomes=played.outcomes[-1:])


@mutant("reward_lost", "The reward of the turn that ends an episode is lost.", needs=_NEEDS)
@_player(EpisodePlayer.play)
async def _reward_lost(play: Any, _: Any, *task: Any) -> Any:
    played = await play(*task)
    return replace(played, outcomes=[*played.outcomes[:-1], StepOutcome(0.0)])


@mutant("never_closed", "Episodes are not closed.", needs=_NEEDS)
@_player(EpisodePlayer._close)
async def _never_closed(close: Any, _: Any, state: Any, episode: Episode) -> None:
    pass


@mutant("open_after_a_failure", "Episodes that fail are not closed.", needs=_NEEDS)
@_player(EpisodePlayer._close)
async def _open_after_a_failure(close: Any, _: Any, state: Any, episode: Episode) -> None:
    if state.outcomes:
        await close(state, episode)


@mutant("endless_episodes", "`environment.max_turns` is ignored.", needs=_NEEDS)
@_player(EpisodePlayer.__init__)
def _endless_episodes(construct: Any, _: Any, environment: Any, config: Any, *others: Any) -> None:
    construct(environment, config.model_copy(update={"max_turns": 10**6}), *others)


@mutant("failure_trained", "Episodes that failed are trained on.", needs=_NEEDS)
@_player(EpisodePlayer.play)
async def _failure_trained(play: Any, _: Any, *task: Any) -> Any:
    return replace(await play(*task), failure="")
