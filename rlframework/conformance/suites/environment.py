"""What an environment must do: samples that are always the same, and judgements that can be trusted.

Only the first samples of each split are looked at. Whether an environment is the same in another process, and how it
goes on after a turn that does not end the conversation, is not tested here.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlframework.config.sections import EnvironmentConfig
from rlframework.conformance.bench import Bench
from rlframework.conformance.measure import ConformanceFailure
from rlframework.conformance.rules import Suite, holds
from rlframework.conformance.sections import plain_paths, section_of
from rlframework.errors import ConfigError, DataError, UserError
from rlframework.interfaces.environment import Environment, Message, Sample, Split, StepOutcome

if TYPE_CHECKING:
    pass

Result = TypeVar("Result")
SPLITS: tuple[Split, Split] = ("train", "validation")
LOOKED_AT = 2000
"""Samples of each split that are compared with each other."""
JUDGED = 8
"""Samples whose answers are judged."""
ODD_REPLIES = ("", " \n\t", "I do not know.", "####", "\\boxed{", "9" * 5000, "\x00\ud800 \U0001f600", "{expression}")
"""What models write too."""


class EnvironmentBench(Bench):
    """Makes environments from `section`, and calls them so that an exception is a failure that says of what."""

    def config(self, **changes: Any) -> EnvironmentConfig:
        """The environment's section with `changes`, checked as a run's configuration is."""
        section = {**self.section, **changes}
        config: Any = section_of(self.record, section, getattr(self.target, "config_model", None))
        checked: EnvironmentConfig = config
        return checked

    def make(self, seed: int = 0) -> Environment:
        """A new environment."""
        made: Environment = self.part()(self.config(), seed=seed)
        return made

    def samples(self, environment: Environment, split: Split, count: int = LOOKED_AT) -> list[Sample]:
        """The first samples of a split."""
        return self.calling(f"reading samples of {split}", lambda: list(environment.samples(split)[:count]))

    def step(self, environment: Environment, pairs: Sequence[tuple[Sample, Sequence[Message]]]) -> list[StepOutcome]:
        """What `environment` says to conversations about samples."""
        samples, conversations = [sample for sample, _ in pairs], [conversation for _, conversation in pairs]
        return self.calling("step", lambda: environment.step(samples, conversations))

    def rewards(self, environment: Environment, pairs: Sequence[tuple[Sample, Sequence[Message]]]) -> list[float]:
        """The rewards of `step`, one for each conversation."""
        outcomes = self.step(environment, pairs)
        self.equal("step gives one outcome for each conversation", len(outcomes), len(pairs))
        return [outcome.reward for outcome in outcomes]

    def calling(self, what: str, call: Callable[[], Result], *allowed: type[Exception]) -> Result:
        """`call`'s result; an exception but those `allowed` is a failure."""
        try:
            return call()
        except ConformanceFailure:
            raise
        except Exception as error:
            if isinstance(error, allowed):
                raise
            self.require(False, f"{what} raises nothing", got=f"{type(error).__name__}: {error}", expected="no error")
            raise AssertionError from error  # not reached


def right_answer(sample: Sample) -> str:
    """What is right, as `Sample` says: the completion to learn from, or the answer itself where there is none."""
    return sample.completion or sample.answer


def with_reply(sample: Sample, *turns: str) -> list[Message]:
    """The sample's conversation and `turns` of the assistant, with a word of the user between two of them."""
    messages: list[Message] = [*sample.messages]
    for number, turn in enumerate(turns):
        if number:
            messages.append({"role": "user", "content": "Are you sure?"})
        messages.append({"role": "assistant", "content": turn})
    return messages


def right_and_wrong(samples: Sequence[Sample]) -> list[tuple[Sample, str, str]]:
    """Samples with the right answer and that of another sample, which has a different one."""
    found = []
    for sample in samples:
        other = next((other for other in samples if other.answer.strip() != sample.answer.strip()), None)
        found.append((sample, right_answer(sample), right_answer(other) if other else "no answer"))
    return found


class EnvironmentSuite(Suite, sealed=True):
    """Of `rlframework.interfaces.environment.Environment`."""

    kind = "environment"
    bench_class = EnvironmentBench

    # -- samples ------------------------------------------------------------------------------------------------------

    @holds(1)
    def test_samples_come_in_the_same_order_each_time_they_are_asked_for(self, bench: EnvironmentBench) -> None:
        """A run that goes on after a break counts on it; shuffling is the loader's work."""
        environment = bench.make()
        for split in SPLITS:
            first, again = bench.samples(environment, split), bench.samples(environment, split)
            bench.require(first or split == "validation", f"there are samples in {split}", got=0, expected="some")
            bench.equal(f"samples of {split}, asked for again", _ids(again), _ids(first))

    @holds(5)
    def test_the_same_configuration_and_seed_give_the_same_samples(self, bench: EnvironmentBench) -> None:
        """Whatever the state of the global random generators: each rank and each later run makes its own."""
        for seed in (0, 1):
            made = []
            for state in (1, 2):
                _seed_everything(state)
                environment = bench.make(seed)
                made.append([bench.samples(environment, split) for split in SPLITS])
            bench.equal(f"ids of samples made again with seed {seed}", _all_ids(made[1]), _all_ids(made[0]))
            bench.require(made[0] == made[1], f"samples made again with seed {seed} are equal in all they hold")

    @holds(1)
    def test_each_sample_has_an_id_of_its_own(self, bench: EnvironmentBench) -> None:
        """Over both splits: logs and token data find samples by it."""
        environment = bench.make()
        seen: dict[str, str] = {}
        for split in SPLITS:
            for number, sample in enumerate(bench.samples(environment, split)):
                place = f"{split}[{number}]"
                before = seen.setdefault(sample.id, place)
                bench.equal(f"the only place of a sample with the id {sample.id!r}", place, before)

    @holds(4)
    def test_no_sample_of_validation_is_trained_on(self, bench: EnvironmentBench) -> None:
        """Neither by its id nor by what is asked: a validation that was trained on measures memory."""
        environment = bench.make()
        train = {_asked(sample): sample.id for sample in bench.samples(environment, "train")}
        for sample in bench.samples(environment, "validation"):
            found = train.get(_asked(sample))
            bench.require(found is None, f"validation sample {sample.id!r} is not in train", got=found, expected=None)

    @holds(1)
    def test_a_sample_is_a_conversation_that_waits_for_the_assistant(self, bench: EnvironmentBench) -> None:
        """Messages have a role and text, and the assistant speaks next; a sample to judge has an answer to judge by."""
        environment = bench.make()
        for split in SPLITS:
            for sample in bench.samples(environment, split, 100):
                for message in sample.messages:
                    bench.equal(f"the keys of a message of {sample.id!r}", set(message), {"role", "content"})
                    bench.require(isinstance(message["content"], str), f"the messages of {sample.id!r} are text")
                if environment.scores:
                    bench.require(sample.messages, f"{sample.id!r} asks something")
                    bench.require(sample.messages[-1]["role"] != "assistant", f"{sample.id!r} waits for the assistant")
                    bench.require(sample.answer, f"{sample.id!r} has an answer to judge by", got=sample.answer)
                else:
                    bench.require(sample.messages or right_answer(sample), f"{sample.id!r} has something to train on")

    # -- judging ------------------------------------------------------------------------------------------------------

    @holds(8)
    def test_what_cannot_be_judged_is_refused(self, bench: EnvironmentBench) -> None:
        """With `scores` False there are no rewards: asking for one is a mistake, and not worth a zero."""
        environment = bench.make()
        sample = bench.samples(environment, "train", 1)[0]
        reply = with_reply(sample, right_answer(sample))
        if environment.scores:
            bench.equal(
                "with `scores`, a right answer has one outcome", len(bench.step(environment, [(sample, reply)])), 1
            )
        else:
            bench.refuses(UserError, lambda: environment.step([sample], [reply]), "judging with `scores` False")

    @holds(1)
    def test_a_right_answer_is_worth_more_than_a_wrong_one(self, bench: EnvironmentBench) -> None:
        """Than that of another sample, and than none at all. Right is the completion, or the answer without one."""
        environment, cases = _judged(bench)
        if not cases:
            return
        right = bench.rewards(environment, [(sample, with_reply(sample, good)) for sample, good, _ in cases])
        wrong = bench.rewards(environment, [(sample, with_reply(sample, bad)) for sample, _, bad in cases])
        empty = bench.rewards(environment, [(sample, with_reply(sample, "")) for sample, _, _ in cases])
        for (sample, good, bad), *rewards in zip(cases, right, wrong, empty, strict=True):
            whose = "completion" if sample.completion else "answer (it has no completion)"
            what = f"the sample's {whose} is a right reply: {good[-60:]!r} to {sample.id!r} is worth more than"
            bench.require(rewards[0] > rewards[1], f"{what} {bad[-60:]!r}", got=rewards[0], expected=f"> {rewards[1]}")
            bench.require(rewards[0] > rewards[2], f"{what} no answer", got=rewards[0], expected=f"> {rewards[2]}")

    @holds(1)
    def test_outcomes_are_in_the_order_of_the_conversations(self, bench: EnvironmentBench) -> None:
        """Each reward belongs to the row that earned it: right and wrong answers, then the same backwards."""
        environment, cases = _judged(bench)
        if not cases:
            return
        pairs = [
            (sample, with_reply(sample, bad if number % 3 else good))
            for number, (sample, good, bad) in enumerate(cases)
        ]
        forwards, backwards = bench.rewards(environment, pairs), bench.rewards(environment, pairs[::-1])
        bench.equal("rewards of conversations given backwards, turned round", backwards[::-1], forwards)
        alone = [bench.rewards(environment, [pair])[0] for pair in pairs]
        bench.equal("rewards of all conversations, in order", forwards, alone)

    @holds(2)
    def test_a_batch_is_judged_as_its_rows_one_by_one(self, bench: EnvironmentBench) -> None:
        """How rows are grouped changes no reward: nothing is relative to the other rows of the call."""
        environment, cases = _judged(bench)
        if not cases:
            return
        pairs = [(sample, with_reply(sample, reply)) for sample, good, bad in cases for reply in (good, bad, "")]
        together = bench.rewards(environment, pairs)
        for pair, reward in zip(pairs, together, strict=True):
            alone = bench.rewards(environment, [pair])[0]
            bench.scalar(f"the reward of {pair[0].id!r} in a batch, to that alone", reward, alone)

    @holds(1)
    def test_the_last_turn_of_the_assistant_is_judged(self, bench: EnvironmentBench) -> None:
        """Not the first, and not all of them together."""
        environment, cases = _judged(bench)
        if not cases:
            return
        for sample, good, bad in cases:
            for turns in ((bad, good), (good, bad)):
                alone, after = with_reply(sample, turns[-1]), with_reply(sample, *turns)
                rewards = bench.rewards(environment, [(sample, alone), (sample, after)])
                what = f"the reward of {sample.id!r} for {turns[-1][-40:]!r} after another turn"
                bench.scalar(what, rewards[1], rewards[0])

    @holds(4)
    def test_judging_changes_no_argument(self, bench: EnvironmentBench) -> None:
        """The rollout goes on with the conversations, and the samples come again in the next epoch."""
        environment, cases = _judged(bench)
        if not cases:
            return
        samples = [sample for sample, _, _ in cases]
        conversations = [with_reply(sample, good) for sample, good, _ in cases]
        before = copy.deepcopy((samples, conversations))
        bench.calling("step", lambda: environment.step(samples, conversations))
        bench.require(conversations == before[1], "step leaves the conversations as they were", got=conversations[:1])
        bench.require(samples == before[0], "step leaves the samples as they were", got=samples[:1])

    @holds(1)
    def test_rewards_are_finite_whatever_the_model_writes(self, bench: EnvironmentBench) -> None:
        """One NaN spoils the advantages of a whole group, and an exception the run; models write anything."""
        environment, cases = _judged(bench)
        if not cases:
            return
        for reply in ODD_REPLIES:
            pairs = [(sample, with_reply(sample, reply)) for sample, _, _ in cases]
            outcomes = bench.step(environment, pairs)
            bench.equal(f"the number of outcomes of {reply[:20]!r}", len(outcomes), len(pairs))
            for (sample, _), outcome in zip(pairs, outcomes, strict=True):
                numbers = {"reward": outcome.reward, **outcome.metrics}
                for name, value in numbers.items():
                    what = f"the {name} of {sample.id!r} for {reply[:20]!r} is finite"
                    bench.require(math.isfinite(value), what, got=value, expected="a finite number")

    @holds(1)
    def test_judging_nothing_gives_nothing(self, bench: EnvironmentBench) -> None:
        """The last batch of a rollout may be empty. With `scores` False it may be refused as well."""
        environment = bench.make()
        try:
            outcomes = bench.calling("step", lambda: list(environment.step([], [])), UserError)
        except UserError as refused:
            bench.require(not environment.scores, "only without `scores` this is refused", got=repr(refused))
        else:
            bench.equal("outcomes of no conversations", outcomes, [])

    # -- the configuration, and the end -------------------------------------------------------------------------------

    @holds(8)
    def test_an_unknown_key_of_its_section_is_an_error(self, bench: EnvironmentBench) -> None:
        """A key with a typing mistake must not be left to its default in silence."""
        bench.refuses(
            ConfigError, lambda: bench.config(no_such_key_of_any_environment=1), "an unknown key", "no_such_key"
        )

    @holds(8)
    def test_a_missing_file_is_an_error_that_names_it(self, bench: EnvironmentBench) -> None:
        """For each key of the section that is the path of a file; an environment without files has nothing to miss."""
        for key, value in plain_paths(bench.section).items():
            if isinstance(value, str) and Path(value).exists():
                missing = f"{bench.folder}/not_there{Path(value).suffix}"
                make = partial(bench.part(), bench.config(**{key: missing}), seed=0)
                bench.refuses(DataError, make, f"{key}={missing}", "not_there")

    @holds(7)
    def test_it_shuts_down_and_leaves_others_alone(self, bench: EnvironmentBench) -> None:
        """Training and validation may have an environment each; the end of one is not the end of the other."""
        ended, other = bench.make(), bench.make()
        before = _ids(bench.samples(other, "train", 10))
        bench.calling("shutdown", ended.shutdown)
        bench.equal("samples of another environment after a shutdown", _ids(bench.samples(other, "train", 10)), before)
        bench.require(bench.samples(bench.make(), "train", 1), "an environment can be made after a shutdown")


def _judged(bench: EnvironmentBench) -> tuple[Environment, list[tuple[Sample, str, str]]]:
    """An environment, and samples with right and wrong answers. Where it does not score, none of these is judged.

    Then all that a test of judging would ask for must be refused, and there is nothing else for it to hold: such a test
    ends where there are no cases.
    """
    environment = bench.make()
    samples = [sample for split in SPLITS[::-1] for sample in bench.samples(environment, split, JUDGED)][:JUDGED]
    bench.require(samples, "there are samples to judge", got=0, expected="some")
    cases = right_and_wrong(samples)
    if environment.scores:
        return environment, cases
    for what, replies in _REPLIES.items():
        told = [with_reply(sample, *replies(good, bad)) for sample, good, bad in cases]
        asked = partial(environment.step, samples, told)
        bench.refuses(UserError, asked, f"judging {what} with `scores` False")
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


def _asked(sample: Sample) -> tuple[tuple[str, str], ...]:
    asked = tuple((message["role"], message["content"]) for message in sample.messages)
    return asked or (("completion", sample.completion),)


def _seed_everything(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
