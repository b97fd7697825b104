"""Requirements on episodes: reproducible, independent of each other, and complete in what they return.

They are played with scripted models; see `episode_scripts`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from rlframework.base.errors import UserError
from rlframework.interfaces.environment import Environment, Sample
from rlframework.interfaces.messages import Message
from rlframework.plugins.types import Capability
from rlframework.rollout.outcomes import EpisodeChecks
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.environment_harness import EnvironmentHarness, seed_everything
from rlframework_conformance.suites.episode_scripts import (
    SCRIPTS,
    Course,
    begin,
    call,
    calls,
    interleaved,
    malformed_calls,
    play,
    words,
)

Result = TypeVar("Result")
PLAYED = 3
"""Samples that are played."""
SEED = 17
LONGEST_BLOCK = 0.5
"""Seconds for which an episode may keep the event loop from running."""


class Episodes(Suite):
    """Tests of `rlframework.interfaces.environment.Episode`."""

    @holds(5, Capability.EPISODES)
    def test_the_same_sample_and_seed_give_the_same_course(self, harness: EnvironmentHarness) -> None:
        """The course of an episode must depend on its sample, its seed and the model's turns alone."""
        for name, script in SCRIPTS.items():
            courses = []
            for state in (1, 2):
                seed_everything(state)
                environment, samples = opened(harness)
                courses.append([run(harness, play(environment.episode(s, SEED), s, script)) for s in samples])
            for sample, first, again in zip(samples, *courses, strict=True):
                same_course(harness, f"{sample.id!r} played again with {name}", again, first)

    @holds(4, Capability.EPISODES)
    def test_episodes_share_no_state(self, harness: EnvironmentHarness) -> None:
        """An episode that is played beside others must have the course that it has alone."""
        environment, samples = opened(harness)
        samples = [sample for sample in samples for _ in range(2)]
        for name, script in SCRIPTS.items():
            alone = [run(harness, play(environment.episode(s, SEED), s, script)) for s in samples]
            episodes = [environment.episode(sample, SEED) for sample in samples]
            beside = run(harness, interleaved(episodes, samples, script))
            for sample, one, other in zip(samples, alone, beside, strict=True):
                same_course(harness, f"{sample.id!r} beside other episodes with {name}", other, one)

    @holds(1, Capability.EPISODES)
    def test_reset_returns_a_conversation_that_the_model_continues(self, harness: EnvironmentHarness) -> None:
        """`reset` must return messages with valid roles, the last not of the assistant, and set valid tools."""
        environment, samples = opened(harness)
        for sample in samples:
            course = run(harness, play(environment.episode(sample, SEED), sample, words))
            checks = EpisodeChecks(harness.record.name, sample)
            checked(harness, lambda checks=checks, course=course: checks.start(course.start))
            checked(harness, lambda checks=checks, course=course: checks.tools(course.tools))

    @holds(1, Capability.EPISODES)
    def test_outcomes_are_finite_and_observations_valid(self, harness: EnvironmentHarness) -> None:
        """Rewards and metrics must be finite, observations must have valid roles and answer calls that were made, and
        an episode that is not done must go on with some.
        """
        environment, samples = opened(harness)
        for script in SCRIPTS.values():
            for sample in samples:
                course = run(harness, play(environment.episode(sample, SEED), sample, script))
                checks = EpisodeChecks(harness.record.name, sample)
                for number, (message, outcome) in enumerate(course.turns, 1):
                    given = message.get("tool_calls", ())
                    checked(harness, lambda a=(outcome, number, given), of=checks: of.outcome(*a))

    @holds(1, Capability.EPISODES)
    def test_each_tool_call_is_answered_in_order(self, harness: EnvironmentHarness) -> None:
        """Unless the episode is done, a turn with tool calls must be answered by one tool message a call, in order.

        Templates of several models do not name the call that a result belongs to.
        """
        environment, samples = opened(harness)
        for sample in samples:
            course = run(harness, play(environment.episode(sample, SEED), sample, calls))
            for message, outcome in course.turns:
                made = [one["id"] for one in message.get("tool_calls", ())]
                if made and not outcome.done:
                    answered = [one.get("tool_call_id") for one in outcome.observations if one["role"] == "tool"]
                    harness.equal(f"the tool calls of {sample.id!r} that are answered", answered, made)

    @holds(8, Capability.EPISODES)
    def test_a_malformed_tool_call_is_an_observation(self, harness: EnvironmentHarness) -> None:
        """A tool call that cannot be made must not raise; with tools, the answer must say why and the episode go on."""
        environment, (sample, *_) = opened(harness)
        probe = environment.episode(sample, SEED)
        tools = run(harness, play(probe, sample, words)).tools
        for what, (name, text) in malformed_calls(tools).items():
            made = call("malformed", name, text)
            message: Message = {"role": "assistant", "content": "", "tool_calls": [made]}
            course = run(harness, play(environment.episode(sample, SEED), sample, lambda *_, given=message: given))
            outcome = course.turns[0][1]
            checked(harness, lambda got=outcome, of=(made,): EpisodeChecks("", sample).outcome(got, 1, of))
            if tools:
                harness.require(not outcome.done, f"the episode goes on after a tool call with {what}")
                answered = [one for one in outcome.observations if one.get("tool_call_id") == "malformed"]
                harness.require(answered and answered[0]["content"], f"a tool call with {what} is answered")

    @holds(7, Capability.EPISODES)
    def test_an_episode_can_be_closed_at_any_time(self, harness: EnvironmentHarness) -> None:
        """`close` must work without `reset`, before the first step, after a step that was cancelled, and at the end."""
        environment, (sample, *_) = opened(harness)

        async def close_early() -> None:
            await environment.episode(sample, SEED).close()
            started = environment.episode(sample, SEED)
            await started.reset()
            await started.close()
            cancelled = environment.episode(sample, SEED)
            course = await begin(cancelled)
            step = asyncio.ensure_future(cancelled.step(calls(sample, course)))
            await asyncio.sleep(0)
            step.cancel()
            await asyncio.wait({step}, timeout=30)
            await cancelled.close()

        run(harness, close_early())
        run(harness, play(environment.episode(sample, SEED), sample, words))

    @holds(7, Capability.EPISODES)
    def test_an_episode_does_not_block_the_others(self, harness: EnvironmentHarness) -> None:
        """`reset`, `step` and `close` must not keep the event loop from running, which all episodes share."""
        environment, samples = opened(harness)
        for name, script in SCRIPTS.items():
            longest = math.inf
            for _ in range(4):  # since other processes may keep this one from running
                plays = [play(environment.episode(s, SEED), s, script) for s in samples]
                longest = min(longest, run(harness, _longest_block(plays)))
                if longest < LONGEST_BLOCK:
                    break
            what = f"seconds for which episodes with {name} block the event loop"
            harness.require(longest < LONGEST_BLOCK, what, got=longest, expected=f"< {LONGEST_BLOCK}")


async def _longest_block(plays: Sequence[Coroutine[Any, Any, Any]]) -> float:
    """Return the longest time in seconds between two turns of the event loop while `plays` run."""
    longest, before = 0.0, time.monotonic()
    playing = asyncio.gather(*plays)
    while not playing.done():
        await asyncio.sleep(0.01)
        longest, before = max(longest, time.monotonic() - before), time.monotonic()
    await playing
    return longest


def opened(harness: EnvironmentHarness) -> tuple[Environment, list[Sample]]:
    """Return an environment and samples to play; it is shut down at the end of the test."""
    environment = harness.make()
    harness.resources.callback(environment.shutdown)
    samples = harness.samples(environment, "train", PLAYED)
    harness.require(samples, "there are samples to play", got=0, expected="some")
    return environment, samples


def run(harness: EnvironmentHarness, playing: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `playing`; any exception is a failure."""
    return harness.checked_call("playing an episode", lambda: asyncio.run(playing))


def checked(harness: EnvironmentHarness, check: Any) -> None:
    """Require a check of `EpisodeChecks` to pass."""
    try:
        check()
    except UserError as error:
        harness.require(False, "what an episode returns is valid", got=str(error), expected="no error")


def same_course(harness: EnvironmentHarness, what: str, got: Course, expected: Course) -> None:
    """Require two courses to be equal."""
    harness.equal(f"the start of {what}", list(got.start), list(expected.start))
    harness.equal(f"the tools of {what}", list(got.tools), list(expected.tools))
    for number, (one, other) in enumerate(zip(got.turns, expected.turns, strict=False), 1):
        harness.equal(f"turn {number} of {what}", one, other)
    harness.equal(f"the number of turns of {what}", len(got.turns), len(expected.turns))
