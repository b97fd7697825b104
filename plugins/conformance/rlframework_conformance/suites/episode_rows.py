"""Requirements on the rows that the rollout manager makes of episodes: exact tokens, masks, rewards.

The model is tiny and writes a script; its engine records what it returns. See `recorded_rollout`.
"""

from __future__ import annotations

import torch

from rlframework.plugins.types import Capability
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.environment_harness import EnvironmentHarness
from rlframework_conformance.suites.episode_scripts import SCRIPTS
from rlframework_conformance.suites.episodes import opened
from rlframework_conformance.suites.recorded_rollout import MOST_TURNS, RecordedRollout

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
    return harness.checked_call(
        f"a rollout with {script}",
        lambda: RecordedRollout.play(environment, config, samples, SCRIPTS[script], harness.models, fails),
    )
