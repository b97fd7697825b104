"""Broken rollouts of episodes: rows that are not what the engine sampled, lost rewards, episodes left open.

The environment's attribute `player` replaces the rollout manager's; see `recorded_rollout`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from rlframework.interfaces.environment import Episode, Sample, StepOutcome
from rlframework.plugins.types import Capability
from rlframework.rollout.episode_player import EpisodePlayer
from rlframework.rollout.result import PlayedEpisode
from rlframework.rollout.trajectory import TrainingRow
from rlframework_conformance.mutants.mutant import Mutant, mutant

_TOKENS = "test_sampled_tokens_are_those_of_the_engine"
_MASKED = "test_observations_are_masked_out"
_COUNTED = "test_tool_results_are_not_counted_as_sampled"
_SCORED = "test_rows_scored_again_have_the_log_probabilities_of_the_engine"
_REWARD = "test_no_reward_is_lost"
_CLOSED = "test_episodes_are_reset_once_and_closed_once"
_ENDED = "test_an_episode_that_does_not_end_is_ended"
_ALONE = "test_a_failing_episode_costs_itself_alone"


def _player(name: str, bug: str, *tests: str) -> Callable[[type[EpisodePlayer]], Mutant]:
    """Decorate a broken `EpisodePlayer` to make it a mutant."""

    def make(broken: type[EpisodePlayer]) -> Mutant:
        def break_it(part: Any) -> type:
            return type("Broken", (part,), {"player": broken})

        return mutant(name, bug, *tests, needs=frozenset({Capability.EPISODES}))(break_it)

    return make


def _rows(name: str, bug: str, *tests: str) -> Callable[[Callable[[TrainingRow], TrainingRow]], Mutant]:
    """Decorate a change of each row to make it a mutant."""

    def make(change: Callable[[TrainingRow], TrainingRow]) -> Mutant:
        class Broken(EpisodePlayer):
            async def play(self, sample: Sample, seed: int, task_seed: int, session: str) -> PlayedEpisode:
                played = await super().play(sample, seed, task_seed, session)
                return replace(played, rows=[change(row) for row in played.rows])

        return _player(name, bug, *tests)(Broken)

    return make


@_rows("observations_trained", "The mask covers observations and tool results too.", _TOKENS, _MASKED, _COUNTED)
def _observations_trained(row: TrainingRow) -> TrainingRow:
    first = int(row.token_mask.nonzero()[0])
    mask = row.token_mask.clone()
    mask[first:] = True
    return replace(row, token_mask=mask)


@_rows("prompt_trained", "The mask covers the last token of the first prompt.", _TOKENS, _MASKED, _COUNTED)
def _prompt_trained(row: TrainingRow) -> TrainingRow:
    mask = row.token_mask.clone()
    mask[int(mask.nonzero()[0]) - 1] = True
    return replace(row, token_mask=mask)


@_rows("end_left_out", "The token that ends a turn is not trained on.", _TOKENS, _MASKED)
def _end_left_out(row: TrainingRow) -> TrainingRow:
    following = torch.cat((row.token_mask[1:], torch.zeros(1, dtype=torch.bool)))
    return replace(row, token_mask=row.token_mask & following, logprobs=row.logprobs * following)


@_rows("tokenised_again", "One sampled token is another, as after rendering the turn again.", _TOKENS, _MASKED, _SCORED)
def _tokenised_again(row: TrainingRow) -> TrainingRow:
    ids = row.token_ids.clone()
    place = int(row.token_mask.nonzero()[0])
    ids[place] = 3 + (int(ids[place]) - 2) % 256
    return replace(row, token_ids=ids)


@_rows("logprobs_shifted", "Log-probabilities are one position late.", _TOKENS, _SCORED)
def _logprobs_shifted(row: TrainingRow) -> TrainingRow:
    return replace(row, logprobs=row.logprobs.roll(1) * row.token_mask)


@_rows("tool_results_reworded", "A row has another observation than was sampled after.", _MASKED, _SCORED)
def _tool_results_reworded(row: TrainingRow) -> TrainingRow:
    ids = row.token_ids.clone()
    place = int(row.token_mask.nonzero()[0]) - 1
    ids[place] = 3 + (int(ids[place]) - 2) % 256
    return replace(row, token_ids=ids)


@_player("tool_result_as_sampled", "Tokens of observations count as sampled ones.", _COUNTED)
class ToolResultAsSampled(EpisodePlayer):
    """The length of an episode is that from its first sampled token on."""

    async def play(self, sample: Sample, seed: int, task_seed: int, session: str) -> PlayedEpisode:
        """See `EpisodePlayer`."""
        played = await super().play(sample, seed, task_seed, session)

        class Counted(PlayedEpisode):
            @property
            def sampled(self) -> int:
                return sum(len(row.token_ids) - int(row.token_mask.nonzero()[0]) for row in self.rows)

        return Counted(**vars(played))


@_player("reward_of_the_last_turn", "Only the last turn's reward is kept.", _REWARD)
class RewardOfTheLastTurn(EpisodePlayer):
    """Rewards before the last turn are lost."""

    async def play(self, sample: Sample, seed: int, task_seed: int, session: str) -> PlayedEpisode:
        """See `EpisodePlayer`."""
        played = await super().play(sample, seed, task_seed, session)
        return replace(played, outcomes=played.outcomes[-1:])


@_player("reward_lost", "The reward of the turn that ends an episode is lost.", _REWARD)
class RewardLost(EpisodePlayer):
    """The last reward is 0."""

    async def play(self, sample: Sample, seed: int, task_seed: int, session: str) -> PlayedEpisode:
        """See `EpisodePlayer`."""
        played = await super().play(sample, seed, task_seed, session)
        return replace(played, outcomes=[*played.outcomes[:-1], StepOutcome(0.0)])


@_player("never_closed", "Episodes are not closed.", _CLOSED)
class NeverClosed(EpisodePlayer):
    """`close` is left out."""

    async def _close(self, state: Any, episode: Episode) -> None:
        pass


@_player("open_after_a_failure", "Episodes that fail are not closed.", _CLOSED)
class OpenAfterFailure(EpisodePlayer):
    """`close` is left out after an error."""

    async def _close(self, state: Any, episode: Episode) -> None:
        if state.outcomes:
            await super()._close(state, episode)


@_player("endless_episodes", "`environment.max_turns` is ignored.", _ENDED)
class Endless(EpisodePlayer):
    """Episodes have any number of turns."""

    def __init__(self, environment: Any, config: Any, chat: Any, bridge: Any) -> None:
        super().__init__(environment, config.model_copy(update={"max_turns": 10**6}), chat, bridge)


@_player("failure_trained", "Episodes that failed are trained on.", _ALONE)
class FailureTrained(EpisodePlayer):
    """The failure is forgotten."""

    async def play(self, sample: Sample, seed: int, task_seed: int, session: str) -> PlayedEpisode:
        """See `EpisodePlayer`."""
        return replace(await super().play(sample, seed, task_seed, session), failure="")
