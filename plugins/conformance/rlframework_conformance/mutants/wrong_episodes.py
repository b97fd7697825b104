"""Broken episodes, and rollouts of them that are not what the engine sampled.

Episodes without tools have fewer mutants. The environment's attribute `player` replaces the rollout manager's; see
`recorded_rollout`.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from rlframework.interfaces.environment import Environment, Episode, StepOutcome
from rlframework.interfaces.messages import Message, ToolSpec
from rlframework.plugins.types import Capability
from rlframework.rollout.episode_player import EpisodePlayer
from rlframework.rollout.result import PlayedEpisode
from rlframework.rollout.trajectory import TrainingRow
from rlframework_conformance.mutants.mutant import around, mutant

_NEEDS = frozenset({Capability.EPISODES})


class _Wrapped(Episode):
    """Passes calls on to `inner`."""

    def __init__(self, inner: Episode) -> None:
        self.inner = inner

    @property
    def tools(self) -> Sequence[ToolSpec]:  # type: ignore[override]
        return self.inner.tools

    async def reset(self) -> Sequence[Message]:
        return await self.inner.reset()

    async def step(self, message: Message) -> StepOutcome:
        return await self.inner.step(message)

    async def close(self) -> None:
        await self.inner.close()


def _in_episodes(*methods: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[[Any], Any]]:
    """Decorate `change(call, episode, ...)`, which runs in place of `methods` of an environment's episodes."""

    def decorate(change: Callable[..., Any]) -> Callable[[Any], Any]:
        broken = around(*methods)(change)(_Wrapped)
        return around(Environment.episode)(lambda episode, _, sample, seed: broken(episode(sample, seed)))

    return decorate


def _has_tools(section: Mapping[str, Any]) -> bool:
    return "id" not in section  # of Gymnasium, whose episodes have none


@mutant("global_random_rewards", "Rewards are drawn from the global random state.", needs=_NEEDS)
@_in_episodes(Episode.step)
async def _global_random_rewards(step: Any, _: Any, message: Message) -> Any:
    outcome = await step(message)
    return replace(outcome, reward=outcome.reward + random.random())


@mutant("shared_between_episodes", "All episodes count their turns in the same place.", needs=_NEEDS)
@_in_episodes(Episode.reset, Episode.step)
async def _shared_between_episodes(call: Any, episode: Any, *message: Message) -> Any:
    shared = type(episode)
    shared.count = shared.count + 1 if message else 0
    result = await call(*message)
    return replace(result, reward=result.reward - 0.01 * shared.count) if message else result


@mutant("steps_of_the_last_opened", "A step is made in the episode that was reset last.", needs=_NEEDS)
@_in_episodes(Episode.reset, Episode.step)
async def _steps_of_the_last_opened(call: Any, episode: Any, *message: Message) -> Any:
    if message:
        return await type(episode).last.step(*message)
    type(episode).last = episode.inner
    return await call()


@mutant("reset_ends_with_the_assistant", "The conversation of `reset` ends with an assistant message.", needs=_NEEDS)
@_in_episodes(Episode.reset)
async def _reset_ends_with_the_assistant(reset: Any, _: Any) -> Sequence[Message]:
    return [*await reset(), {"role": "assistant", "content": "I see."}]


@mutant("unknown_role", "A message of `reset` has the role robot.", needs=_NEEDS)
@_in_episodes(Episode.reset)
async def _unknown_role(reset: Any, _: Any) -> Sequence[Message]:
    return [{"role": "robot", "content": "Hello."}, *await reset()]


@mutant("nan_reward", "The reward of each turn is NaN.", needs=_NEEDS)
@_in_episodes(Episode.step)
async def _nan_reward(step: Any, _: Any, message: Message) -> Any:
    return replace(await step(message), reward=float("nan"))


@mutant("nothing_observed", "A turn that does not end the episode is answered by nothing.", needs=_NEEDS)
@_in_episodes(Episode.step)
async def _nothing_observed(step: Any, _: Any, message: Message) -> Any:
    return replace(await step(message), observations=())


@mutant("wrong_id", "Tool messages have the id of another call.", needs=_NEEDS, applies=_has_tools)
@_in_episodes(Episode.step)
async def _wrong_id(step: Any, _: Any, message: Message) -> Any:
    outcome = await step(message)
    seen = ({**one, "tool_call_id": "call_0"} if one["role"] == "tool" else one for one in outcome.observations)
    return replace(outcome, observations=tuple(seen))


@mutant("answers_out_of_order", "The last tool call is answered first.", needs=_NEEDS, applies=_has_tools)
@_in_episodes(Episode.step)
async def _answers_out_of_order(step: Any, _: Any, message: Message) -> Any:
    outcome = await step(message)
    return replace(outcome, observations=outcome.observations[::-1])


@mutant("one_call_a_turn", "Only the first tool call is answered.", needs=_NEEDS, applies=_has_tools)
@_in_episodes(Episode.step)
async def _one_call_a_turn(step: Any, _: Any, message: Message) -> Any:
    outcome = await step(message)
    return replace(outcome, observations=outcome.observations[:1])


@mutant("dies_of_malformed_calls", "A tool call that is not JSON raises.", needs=_NEEDS)
@_in_episodes(Episode.step)
async def _dies_of_malformed_calls(step: Any, _: Any, message: Message) -> Any:
    for call in message.get("tool_calls", ()):
        json.loads(call["function"]["arguments"])
    return await step(message)


@mutant(
    "ends_at_malformed_calls", "A tool call that cannot be made ends the episode.", needs=_NEEDS, applies=_has_tools
)
@_in_episodes(Episode.step)
async def _ends_at_malformed_calls(step: Any, _: Any, message: Message) -> Any:
    outcome = await step(message)
    return StepOutcome(outcome.reward) if message.get("tool_calls") else outcome


@mutant("close_needs_reset", "`close` raises without `reset`.", needs=_NEEDS)
@_in_episodes(Episode.reset, Episode.close)
async def _close_needs_reset(call: Any, episode: Any) -> Any:
    if call.__name__ == "close" and not getattr(episode, "started", False):
        raise RuntimeError("not started")
    episode.started = True
    return await call()


@mutant("blocking_step", "A step waits without awaiting.", needs=_NEEDS)
@_in_episodes(Episode.step)
async def _blocking_step(step: Any, _: Any, message: Message) -> Any:
    time.sleep(0.8)  # the bug
    return await step(message)


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
