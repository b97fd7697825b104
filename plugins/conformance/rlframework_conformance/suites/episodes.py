"""Requirements on episodes, and on the rows that the rollout manager makes of them: exact tokens, masks, rewards.

Episodes are played with scripted models, see `episode_scripts`; for rows the model is tiny, and its engine records what
it returns, see `recorded_rollout`.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

import torch

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
from rlframework_conformance.suites.recorded_rollout import MOST_TURNS, RecordedRollout

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
    return harness.must_not_raise("playing an episode", lambda: asyncio.run(playing))


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


RESCORED = 1e-4
"""The bound of the recording engine: its log-probabilities come from the same model, a prompt at a time."""


class EpisodeRows(Suite):
    """Tests of `rlframework.rollout.episode_player` with the environment's episodes."""

    @holds(11, Capability.EPISODES)
    def test_sampled_tokens_are_those_of_the_engine(self, harness: EnvironmentHarness) -> None:
        """The trained tokens of an episode's rows must be those that the engine returned, in order, bit by bit, with
        their log-probabilities.
        """
        for recorded in rollouts(harness):
            for number, session in enumerate(recorded.sessions):
                trained = recorded.trained_of(number)
                for quantity, of_row in (("input_ids", "token_ids"), ("generation_logprobs", "logprobs")):
                    expected = torch.cat([getattr(result, of_row) for _, result in session])
                    harness.exact(f"{quantity} of the trained tokens", trained[quantity], expected)

    @holds(11, Capability.EPISODES)
    def test_observations_are_masked_out(self, harness: EnvironmentHarness) -> None:
        """Each prompt must be in a row as it was sent, with only sampled tokens trained; what a row has besides
        sampled tokens must have mask and log-probability 0.
        """
        for recorded in rollouts(harness):
            mask, logprobs = recorded.result.data["token_mask"], recorded.result.data["generation_logprobs"]
            harness.require(not logprobs[mask == 0].any(), "log-probabilities are 0 where the mask is")
            for number, session in enumerate(recorded.sessions):
                ids, trained = recorded.row_texts(number)
                expected = recorded.expected_rows(session)
                harness.equal("the tokens of an episode's rows", ids, [row for row, _ in expected])
                harness.equal("the masks of an episode's rows", trained, [mask for _, mask in expected])

    @holds(11, Capability.EPISODES)
    def test_tool_results_are_not_counted_as_sampled(self, harness: EnvironmentHarness) -> None:
        """The length of an episode must count the tokens that the engine returned, and not those of observations."""
        for recorded in rollouts(harness):
            expected = [sum(len(result.token_ids) for _, result in session) for session in recorded.sessions]
            harness.equal("completion_lengths", recorded.result.completion_lengths.tolist(), expected)
            sums = torch.zeros(len(expected))
            sums.index_add_(0, recorded.result.episode_of, recorded.result.data["token_mask"].sum(1))
            harness.equal("trained tokens of each episode", sums.tolist(), expected)

    @holds(11, Capability.EPISODES)
    def test_rows_scored_again_have_the_log_probabilities_of_the_engine(self, harness: EnvironmentHarness) -> None:
        """The log-probabilities of the trained tokens, computed from the rows, must be those of the engine."""
        for recorded in rollouts(harness):
            data = recorded.result.data
            trained = data["token_mask"] != 0
            scored = recorded.score(data)
            harness.values("logprobs", data["generation_logprobs"][trained], scored[trained], RESCORED)

    @holds(11, Capability.EPISODES)
    def test_no_reward_is_lost(self, harness: EnvironmentHarness) -> None:
        """The reward of an episode must be the sum of those of its outcomes, in the order of the samples."""
        for recorded in rollouts(harness):
            for number, episode in enumerate(recorded.episodes):
                expected = sum(float(outcome.reward) for outcome in episode.outcomes)
                harness.scalar(f"the reward of episode {number}", recorded.result.rewards[number], expected)

    @holds(7, Capability.EPISODES)
    def test_episodes_are_reset_once_and_closed_once(self, harness: EnvironmentHarness) -> None:
        """`reset` must come before the first `step`, and `close` once, after the last, also if a step fails."""
        for recorded in (*rollouts(harness), _failing(harness)):
            for number, episode in enumerate(recorded.episodes):
                turns = len(episode.called) - 2
                expected = ["reset", *["step"] * turns, "close"]
                harness.equal(f"the calls of episode {number}", episode.called, expected)

    @holds(8, Capability.EPISODES)
    def test_an_episode_that_does_not_end_is_ended(self, harness: EnvironmentHarness) -> None:
        """An episode must end after `max_turns` turns, as truncated unless it is done."""
        for recorded in rollouts(harness):
            for number, episode in enumerate(recorded.episodes):
                turns = episode.called.count("step")
                harness.require(1 <= turns <= MOST_TURNS, "turns", got=turns, expected=f"1 to {MOST_TURNS}")
                done = bool(episode.outcomes) and episode.outcomes[-1].done
                harness.equal(
                    "an episode that is not done is truncated", bool(recorded.result.truncated[number]), not done
                )

    @holds(7, Capability.EPISODES)
    def test_a_failing_episode_costs_itself_alone(self, harness: EnvironmentHarness) -> None:
        """If a step raises, the rows of its episode must not be trained on, and those of the others be as without."""
        sound, failed = next(iter(rollouts(harness))), _failing(harness)
        harness.equal(
            "the episodes that failed",
            failed.result.failed.tolist(),
            [False, True, *[False] * (len(failed.sessions) - 2)],
        )
        for number in range(len(failed.sessions)):
            kept = bool((failed.result.data["sample_mask"][failed.result.episode_of == number] != 0).any())
            harness.equal(f"episode {number} is trained on", kept, number != 1)
            if number != 1:
                harness.equal(f"the rows of episode {number}", failed.row_texts(number), sound.row_texts(number))
                harness.scalar("the reward", failed.result.rewards[number], sound.result.rewards[number])


def rollouts(harness: EnvironmentHarness) -> list[RecordedRollout]:
    """Return a rollout with each scripted model."""
    return [_rollout(harness, name) for name in SCRIPTS]


def _failing(harness: EnvironmentHarness) -> RecordedRollout:
    """Return the first of `rollouts`, in which the first step of episode 1 raises."""
    return _rollout(harness, next(iter(SCRIPTS)), fails=1)


def _rollout(harness: EnvironmentHarness, script: str, fails: int | None = None) -> RecordedRollout:
    environment, samples = opened(harness)
    config = harness.config(max_turns=MOST_TURNS)
    samples = (samples * 2)[: max(2, len(samples))]
    return harness.must_not_raise(
        f"a rollout with {script}",
        lambda: RecordedRollout.play(environment, config, samples, SCRIPTS[script], harness.models, fails),
    )
