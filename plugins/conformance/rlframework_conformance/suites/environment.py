"""Requirements on environments: reproducible samples and rewards that can be trusted.

Tests of episodes are in `episodes`. Only the first samples of each split are examined. Not covered: whether an
environment is the same in another process, and what it does after a turn that does not end the conversation.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from rlframework.base.errors import ConfigError, DataError, UserError
from rlframework.interfaces.environment import Environment, Sample, Split, has_episodes
from rlframework.interfaces.messages import Message, text_of
from rlframework.plugins.types import Capability
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.sections import plain_paths
from rlframework_conformance.suites.environment_harness import EnvironmentHarness, right_answer, seed_everything
from rlframework_conformance.suites.episodes import EpisodeRows, Episodes

SINGLE = frozenset({Capability.EPISODES})
"""The capabilities that environments of single turns do not declare."""
SPLITS: tuple[Split, Split] = ("train", "validation")
SCORED_SAMPLES = 8
"""Samples whose answers are scored."""
ODD_REPLIES = ("", " \n\t", "I do not know.", "####", "\\boxed{", "9" * 5000, "\x00\ud800 \U0001f600", "{expression}")
"""Malformed replies that models do write."""


def with_reply(sample: Sample, *turns: str) -> list[Message]:
    """Return the sample's conversation followed by the assistant's `turns`, with a user message between two turns."""
    messages: list[Message] = [*sample.messages]
    for number, turn in enumerate(turns):
        if number:
            messages.append({"role": "user", "content": "Are you sure?"})
        messages.append({"role": "assistant", "content": turn})
    return messages


def right_and_wrong(samples: Sequence[Sample]) -> list[tuple[Sample, str, str]]:
    """Pair each sample with its correct answer and with the different answer of another sample."""
    found = []
    for sample in samples:
        other = next((other for other in samples if other.answer.strip() != sample.answer.strip()), None)
        found.append((sample, right_answer(sample), right_answer(other) if other else "no answer"))
    return found


class EnvironmentSuite(EpisodeRows, Episodes, Suite, sealed=True):
    """The conformance suite of `rlframework.interfaces.environment.Environment`."""

    kind = "environment"
    harness_class = EnvironmentHarness

    # -- samples ------------------------------------------------------------------------------------------------------

    @holds(1)
    def test_samples_come_in_the_same_order_each_time_they_are_asked_for(self, harness: EnvironmentHarness) -> None:
        """`samples` must return the same samples in the same order on every call.

        A resumed run relies on it; shuffling is the data loader's job.
        """
        environment = harness.make()
        for split in SPLITS:
            first, again = harness.samples(environment, split), harness.samples(environment, split)
            harness.require(first or split == "validation", f"there are samples in {split}", got=0, expected="some")
            harness.equal(f"samples of {split} on the second call", _ids(again), _ids(first))

    @holds(5)
    def test_the_same_configuration_and_seed_give_the_same_samples(self, harness: EnvironmentHarness) -> None:
        """The same configuration and seed must give the same samples, regardless of the global random state.

        Each rank and each later run creates its own environment.
        """
        for seed in (0, 1):
            made = []
            for state in (1, 2):
                seed_everything(state)
                environment = harness.make(seed)
                made.append([harness.samples(environment, split) for split in SPLITS])
            harness.equal(f"sample ids of a second environment with seed {seed}", _all_ids(made[1]), _all_ids(made[0]))
            harness.require(
                made[0] == made[1], f"a second environment with seed {seed} has equal samples in every field"
            )

    @holds(1)
    def test_each_sample_has_an_id_of_its_own(self, harness: EnvironmentHarness) -> None:
        """Sample ids must be unique across both splits; logs and token data look samples up by id."""
        environment = harness.make()
        seen: dict[str, str] = {}
        for split in SPLITS:
            for number, sample in enumerate(harness.samples(environment, split)):
                place = f"{split}[{number}]"
                before = seen.setdefault(sample.id, place)
                harness.equal(f"the only sample with id {sample.id!r}", place, before)

    @holds(4)
    def test_no_sample_of_validation_is_trained_on(self, harness: EnvironmentHarness) -> None:
        """No validation sample may occur in the training split, neither by id nor by question.

        Otherwise validation measures memorization.
        """
        environment = harness.make()
        question = _task if has_episodes(environment) else _question
        train = {question(sample): sample.id for sample in harness.samples(environment, "train")}
        for sample in harness.samples(environment, "validation"):
            found = train.get(question(sample))
            harness.require(found is None, f"validation sample {sample.id!r} is not in train", got=found, expected=None)

    @holds(1)
    def test_a_sample_is_a_conversation_that_waits_for_the_assistant(self, harness: EnvironmentHarness) -> None:
        """A sample must be a list of text messages with roles in which the assistant speaks next.

        A sample that is scored must have an answer to score against.
        """
        environment = harness.make()
        for split in SPLITS:
            for sample in harness.samples(environment, split, 100):
                for message in sample.messages:
                    harness.equal(f"the keys of a message of {sample.id!r}", set(message), {"role", "content"})
                    harness.require(isinstance(text_of(message), str), f"the messages of {sample.id!r} are text")
                if environment.scores:
                    harness.require(sample.messages, f"{sample.id!r} has messages")
                    harness.require(
                        sample.messages[-1]["role"] != "assistant", f"{sample.id!r} waits for the assistant"
                    )
                    answer = sample.answer or has_episodes(environment)  # whose steps may score by what happened
                    harness.require(answer, f"{sample.id!r} has an answer to score against", got=sample.answer)
                else:
                    harness.require(sample.messages or right_answer(sample), f"{sample.id!r} has something to train on")

    @holds(8)
    def test_episodes_are_declared(self, harness: EnvironmentHarness) -> None:
        """The record must declare `episodes` if the environment has them, and otherwise not."""
        declared = Capability.EPISODES in harness.record.capabilities
        harness.equal("the record declares episodes", declared, has_episodes(harness.make()))

    # -- scoring ------------------------------------------------------------------------------------------------------

    @holds(8, without=SINGLE)
    def test_what_cannot_be_judged_is_refused(self, harness: EnvironmentHarness) -> None:
        """With `scores` False, `step` must raise a `UserError` instead of returning a reward of 0."""
        environment = harness.make()
        sample = harness.samples(environment, "train", 1)[0]
        reply = with_reply(sample, right_answer(sample))
        if environment.scores:
            harness.equal(
                "with `scores`, a right answer has one outcome", len(harness.step(environment, [(sample, reply)])), 1
            )
        else:
            harness.raises(UserError, lambda: environment.step([sample], [reply]), "step with `scores` False")

    @holds(1, without=SINGLE)
    def test_a_right_answer_is_worth_more_than_a_wrong_one(self, harness: EnvironmentHarness) -> None:
        """A correct answer must earn more than another sample's answer and more than an empty reply.

        The correct answer is the completion, or the answer if there is no completion.
        """
        environment, cases = _scoring_cases(harness)
        if not cases:
            return
        right = harness.rewards(environment, [(sample, with_reply(sample, good)) for sample, good, _ in cases])
        wrong = harness.rewards(environment, [(sample, with_reply(sample, bad)) for sample, _, bad in cases])
        empty = harness.rewards(environment, [(sample, with_reply(sample, "")) for sample, _, _ in cases])
        for (sample, good, bad), *rewards in zip(cases, right, wrong, empty, strict=True):
            whose = "completion" if sample.completion else "answer (it has no completion)"
            what = f"the sample's {whose} is a correct reply: {good[-60:]!r} to {sample.id!r} must earn more than"
            harness.require(
                rewards[0] > rewards[1], f"{what} {bad[-60:]!r}", got=rewards[0], expected=f"> {rewards[1]}"
            )
            harness.require(rewards[0] > rewards[2], f"{what} no answer", got=rewards[0], expected=f"> {rewards[2]}")

    @holds(2, without=SINGLE)
    def test_a_batch_is_judged_as_its_rows_one_by_one(self, harness: EnvironmentHarness) -> None:
        """Outcomes must be in the order of the conversations, and none may depend on the other rows of the call."""
        environment, cases = _scoring_cases(harness)
        if not cases:
            return
        pairs = [(sample, with_reply(sample, reply)) for sample, good, bad in cases for reply in (good, bad, "")]
        batched = harness.rewards(environment, pairs)
        for pair, reward in zip(pairs, batched, strict=True):
            alone = harness.rewards(environment, [pair])[0]
            harness.scalar(f"the reward of {pair[0].id!r} in a batch, compared with a call of its own", reward, alone)

    @holds(1, without=SINGLE)
    def test_the_last_turn_of_the_assistant_is_judged(self, harness: EnvironmentHarness) -> None:
        """The reward must be that of the assistant's last turn, not of the first and not of all turns batched."""
        environment, cases = _scoring_cases(harness)
        if not cases:
            return
        for sample, good, bad in cases:
            for turns in ((bad, good), (good, bad)):
                single, after = with_reply(sample, turns[-1]), with_reply(sample, *turns)
                rewards = harness.rewards(environment, [(sample, single), (sample, after)])
                what = f"the reward of {sample.id!r} for {turns[-1][-40:]!r} after another turn"
                harness.scalar(what, rewards[1], rewards[0])

    @holds(4, without=SINGLE)
    def test_judging_changes_no_argument(self, harness: EnvironmentHarness) -> None:
        """`step` must not modify the samples or the conversations that it receives.

        The rollout continues with the conversations, and the samples return in the next epoch.
        """
        environment, cases = _scoring_cases(harness)
        if not cases:
            return
        samples = [sample for sample, _, _ in cases]
        conversations = [with_reply(sample, good) for sample, good, _ in cases]
        before = copy.deepcopy((samples, conversations))
        harness.must_not_raise("step", lambda: environment.step(samples, conversations))
        harness.require(conversations == before[1], "step must not modify the conversations", got=conversations[:1])
        harness.require(samples == before[0], "step must not modify the samples", got=samples[:1])

    @holds(1, without=SINGLE)
    def test_rewards_are_finite_whatever_the_model_writes(self, harness: EnvironmentHarness) -> None:
        """Rewards and metrics must be finite for any text a model may write.

        One NaN spoils the advantages of a whole group, and an exception ends the run.
        """
        environment, cases = _scoring_cases(harness)
        if not cases:
            return
        for reply in ODD_REPLIES:
            pairs = [(sample, with_reply(sample, reply)) for sample, _, _ in cases]
            outcomes = harness.step(environment, pairs)
            harness.equal(f"the number of outcomes of {reply[:20]!r}", len(outcomes), len(pairs))
            for (sample, _), outcome in zip(pairs, outcomes, strict=True):
                numbers = {"reward": outcome.reward, **outcome.metrics}
                for name, value in numbers.items():
                    what = f"the {name} of {sample.id!r} for {reply[:20]!r} is finite"
                    harness.require(math.isfinite(value), what, got=value, expected="a finite number")

    @holds(1, without=SINGLE)
    def test_judging_nothing_gives_nothing(self, harness: EnvironmentHarness) -> None:
        """`step` with no conversations must return no outcomes; the last batch of a rollout may be empty.

        With `scores` False it may raise a `UserError` instead.
        """
        environment = harness.make()
        try:
            outcomes = harness.must_not_raise("step", lambda: list(environment.step([], [])), UserError)
        except UserError as error:
            harness.require(
                not environment.scores,
                "only an environment without `scores` may reject an empty call",
                got=repr(error),
            )
        else:
            harness.equal("outcomes of no conversations", outcomes, [])

    # -- configuration and shutdown ----------------------------------------------------------------------------------

    @holds(8)
    def test_an_unknown_key_of_its_section_is_an_error(self, harness: EnvironmentHarness) -> None:
        """An unknown key in the environment's section must raise a `ConfigError`, so that no typing mistake goes
        unnoticed.
        """
        harness.raises(
            ConfigError, lambda: harness.config(no_such_key_of_any_environment=1), "an unknown key", "no_such_key"
        )

    @holds(8)
    def test_a_missing_file_is_an_error_that_names_it(self, harness: EnvironmentHarness) -> None:
        """A missing file must raise a `DataError` that names it, for each key of the section that is a file path."""
        for key, value in plain_paths(harness.section).items():
            if isinstance(value, str) and Path(value).exists():
                missing = f"{harness.folder}/not_there{Path(value).suffix}"
                make = partial(harness.load_class(), harness.config(**{key: missing}), seed=0)
                harness.raises(DataError, make, f"{key}={missing}", "not_there")

    @holds(7)
    def test_it_shuts_down_and_leaves_others_alone(self, harness: EnvironmentHarness) -> None:
        """Shutting down one environment must not affect another; training and validation may have one each."""
        ended, other = harness.make(), harness.make()
        before = _ids(harness.samples(other, "train", 10))
        harness.must_not_raise("shutdown", ended.shutdown)
        harness.equal(
            "samples of another environment after a shutdown", _ids(harness.samples(other, "train", 10)), before
        )
        harness.require(harness.samples(harness.make(), "train", 1), "an environment can be made after a shutdown")


def _scoring_cases(harness: EnvironmentHarness) -> tuple[Environment, list[tuple[Sample, str, str]]]:
    """Return an environment and samples with right and wrong answers; no samples if it does not score.

    If it does not score, `step` must reject every kind of reply that the scoring tests use. Nothing else remains to be
    tested then, so a test returns early if there are no cases.
    """
    environment = harness.make()
    samples = [sample for split in SPLITS[::-1] for sample in harness.samples(environment, split, SCORED_SAMPLES)][
        :SCORED_SAMPLES
    ]
    harness.require(samples, "there are samples to score", got=0, expected="some")
    cases = right_and_wrong(samples)
    if environment.scores:
        return environment, cases
    for what, replies in _REPLIES.items():
        conversations = [with_reply(sample, *replies(good, bad)) for sample, good, bad in cases]
        asked = partial(environment.step, samples, conversations)
        harness.raises(UserError, asked, f"step with {what} and `scores` False")
    return environment, []


_REPLIES: Mapping[str, Callable[[str, str], tuple[str, ...]]] = {
    "right answers": lambda good, bad: (good,),
    "wrong answers": lambda good, bad: (bad,),
    "no answers": lambda good, bad: ("",),
    "second answers": lambda good, bad: (bad, good),
    "odd answers": lambda good, bad: (ODD_REPLIES[-2],),
}


def _ids(samples: Sequence[Sample]) -> list[str]:
    return [sample.id for sample in samples]


def _all_ids(splits: Sequence[Sequence[Sample]]) -> list[list[str]]:
    return [_ids(samples) for samples in splits]


def _question(sample: Sample) -> tuple[tuple[str, str], ...]:
    asked = tuple((message["role"], text_of(message)) for message in sample.messages)
    return asked or (("completion", sample.completion),)


def _task(sample: Sample) -> tuple[tuple[str, str], ...]:
    """Return the question with the metadata, in which environments with episodes may describe the task."""
    return (*_question(sample), ("metadata", repr(sample.metadata)))
