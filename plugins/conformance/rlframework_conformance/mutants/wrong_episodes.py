"""Broken episodes: shared state, wrong messages, steps that block. Those without tools have fewer mutants."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rlframework.interfaces.environment import Episode, Sample, StepOutcome
from rlframework.interfaces.messages import Message
from rlframework.plugins.types import Capability
from rlframework_conformance.mutants.mutant import mutant

_NEEDS = frozenset({Capability.EPISODES})
_COURSE = "test_the_same_sample_and_seed_give_the_same_course"
_STATE = "test_episodes_share_no_state"
_RESET = "test_reset_returns_a_conversation_that_the_model_continues"
_VALID = "test_outcomes_are_finite_and_observations_valid"
_ANSWERED = "test_each_tool_call_is_answered_in_order"
_MALFORMED = "test_a_malformed_tool_call_is_an_observation"
_CLOSE = "test_an_episode_can_be_closed_at_any_time"
_BLOCKS = "test_an_episode_does_not_block_the_others"


class _Wrapped(Episode):
    """Passes calls on to `inner`; mutants override some."""

    def __init__(self, inner: Episode, sample: Sample) -> None:
        self.inner, self.sample = inner, sample
        self.started = False

    async def reset(self) -> Sequence[Message]:
        self.started = True
        start = await self.inner.reset()
        self.tools = self.inner.tools
        return start

    async def step(self, message: Message) -> StepOutcome:
        return await self.inner.step(message)

    async def close(self) -> None:
        await self.inner.close()


def _episodes(wrapped: type[_Wrapped]) -> Callable[[Any], type]:
    """Break the episodes of an environment with `wrapped`."""

    def break_it(part: Any) -> type:
        class Broken(part):  # type: ignore[misc]
            def episode(self, sample: Sample, seed: int) -> Episode:
                return wrapped(super().episode(sample, seed), sample)

        return Broken

    return break_it


def _outcomes(change: Callable[[StepOutcome, Message], StepOutcome]) -> Callable[[Any], type]:
    """Break the outcomes of an environment's episodes."""

    class Wrapped(_Wrapped):
        async def step(self, message: Message) -> StepOutcome:
            return change(await super().step(message), message)

    return _episodes(Wrapped)


def _has_tools(section: Mapping[str, Any]) -> bool:
    return "id" not in section  # of Gymnasium, whose episodes have none


@mutant("global_random_rewards", "Rewards are drawn from the global random state.", _COURSE, needs=_NEEDS)
@_outcomes
def _global_random_rewards(outcome: StepOutcome, message: Message) -> StepOutcome:
    return replace(outcome, reward=outcome.reward + random.random())


class _SharedCount(_Wrapped):
    count = [0]  # noqa: RUF012  # the bug

    async def reset(self) -> Sequence[Message]:
        self.count[0] = 0
        return await super().reset()

    async def step(self, message: Message) -> StepOutcome:
        self.count[0] += 1
        outcome = await super().step(message)
        return replace(outcome, reward=outcome.reward - 0.01 * self.count[0])


shared_state = mutant(
    "shared_between_episodes", "All episodes count their turns in the same place.", _STATE, needs=_NEEDS
)(_episodes(_SharedCount))


class _LastOpened(_Wrapped):
    current: list[_Wrapped] = []  # noqa: RUF012  # the bug

    async def reset(self) -> Sequence[Message]:
        self.current[:] = [self]
        return await super().reset()

    async def step(self, message: Message) -> StepOutcome:
        return await self.current[0].inner.step(message)


last_opened = mutant(
    "steps_of_the_last_opened", "A step is made in the episode that was reset last.", _STATE, needs=_NEEDS
)(_episodes(_LastOpened))


class _SpeaksFirst(_Wrapped):
    async def reset(self) -> Sequence[Message]:
        return [*await super().reset(), {"role": "assistant", "content": "I see."}]


class _OddRole(_Wrapped):
    async def reset(self) -> Sequence[Message]:
        return [{"role": "robot", "content": "Hello."}, *await super().reset()]


speaks_first = mutant(
    "reset_ends_with_the_assistant", "The conversation of `reset` ends with an assistant message.", _RESET, needs=_NEEDS
)(_episodes(_SpeaksFirst))
odd_role = mutant("unknown_role", "A message of `reset` has the role robot.", _RESET, needs=_NEEDS)(_episodes(_OddRole))


@mutant("nan_reward", "The reward of each turn is NaN.", _VALID, needs=_NEEDS)
@_outcomes
def _nan_reward(outcome: StepOutcome, message: Message) -> StepOutcome:
    return replace(outcome, reward=float("nan"))


@mutant("nothing_observed", "A turn that does not end the episode is answered by nothing.", _VALID, needs=_NEEDS)
@_outcomes
def _nothing_observed(outcome: StepOutcome, message: Message) -> StepOutcome:
    return replace(outcome, observations=())


def _answers(outcome: StepOutcome, change: Callable[[list[Message]], list[Message]]) -> StepOutcome:
    return replace(outcome, observations=tuple(change(list(outcome.observations))))


@mutant("wrong_id", "Tool messages have the id of another call.", _VALID, needs=_NEEDS, applies=_has_tools)
@_outcomes
def _wrong_id(outcome: StepOutcome, message: Message) -> StepOutcome:
    return _answers(
        outcome,
        lambda seen: [{**one, "tool_call_id": "call_0"} if one["role"] == "tool" else one for one in seen],
    )


@mutant("answers_out_of_order", "The last tool call is answered first.", _ANSWERED, needs=_NEEDS, applies=_has_tools)
@_outcomes
def _answers_out_of_order(outcome: StepOutcome, message: Message) -> StepOutcome:
    return _answers(outcome, lambda seen: seen[::-1])


@mutant("one_call_a_turn", "Only the first tool call is answered.", _ANSWERED, needs=_NEEDS, applies=_has_tools)
@_outcomes
def _one_call_a_turn(outcome: StepOutcome, message: Message) -> StepOutcome:
    return _answers(outcome, lambda seen: seen[:1])


class _Strict(_Wrapped):
    async def step(self, message: Message) -> StepOutcome:
        for call in message.get("tool_calls", ()):
            json.loads(call["function"]["arguments"])
        return await super().step(message)


strict = mutant("dies_of_malformed_calls", "A tool call that is not JSON raises.", _MALFORMED, needs=_NEEDS)(
    _episodes(_Strict)
)


@mutant(
    "ends_at_malformed_calls",
    "A tool call that cannot be made ends the episode.",
    _MALFORMED,
    needs=_NEEDS,
    applies=_has_tools,
)
@_outcomes
def _ends_at_malformed(outcome: StepOutcome, message: Message) -> StepOutcome:
    return StepOutcome(outcome.reward) if message.get("tool_calls") else outcome


class _NeedsReset(_Wrapped):
    async def close(self) -> None:
        if not self.started:
            raise RuntimeError("not started")
        await super().close()


needs_reset = mutant("close_needs_reset", "`close` raises without `reset`.", _CLOSE, needs=_NEEDS)(
    _episodes(_NeedsReset)
)


class _Blocks(_Wrapped):
    async def step(self, message: Message) -> StepOutcome:
        time.sleep(0.8)  # the bug
        return await super().step(message)


blocks = mutant("blocking_step", "A step waits without awaiting.", _BLOCKS, needs=_NEEDS)(_episodes(_Blocks))
