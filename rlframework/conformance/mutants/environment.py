"""Broken environments: samples that leak or wander, and judges that are mistaken.

They break an environment that scores and reads files; the mutant of the missing file has nothing to break in another.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ConfigDict

from rlframework.config.sections import EnvironmentConfig
from rlframework.conformance.mutants.mutant import Mutant
from rlframework.errors import DataError
from rlframework.interfaces.environment import Message, Sample, Split, StepOutcome


def validation_leaks(part: Any) -> type:
    """The first samples of validation are trained on."""

    class Leaking(part):  # type: ignore[misc]
        def samples(self, split: Split) -> Sequence[Sample]:
            samples = list(super().samples(split))
            return list(super().samples("validation"))[:1] + samples if split == "train" else samples

    return Leaking


def renamed_leak(part: Any) -> type:
    """One sample of validation is in train under another id."""

    class Leaking(part):  # type: ignore[misc]
        def samples(self, split: Split) -> Sequence[Sample]:
            samples = list(super().samples(split))
            leaked = replace(super().samples("validation")[0], id="leaked")
            return [leaked, *samples] if split == "train" else samples

    return Leaking


def shuffled_each_time(part: Any) -> type:
    """Every call has another order."""

    class Shuffled(part):  # type: ignore[misc]
        def __init__(self, config: Any, *, seed: int) -> None:
            super().__init__(config, seed=seed)
            self._order = random.Random(seed)

        def samples(self, split: Split) -> Sequence[Sample]:
            samples = list(super().samples(split))
            self._order.shuffle(samples)
            return samples

    return Shuffled


def global_random_state(part: Any) -> type:
    """Which samples there are, and in which order, hangs on whoever drew random numbers before."""

    class Drawn(part):  # type: ignore[misc]
        def __init__(self, config: Any, *, seed: int) -> None:
            super().__init__(config, seed=seed)
            self._drawn = random.random()  # the bug is that this is not a generator of its own

        def samples(self, split: Split) -> Sequence[Sample]:
            samples = list(super().samples(split))
            random.Random(self._drawn).shuffle(samples)
            return samples

    return Drawn


def one_id_for_all(part: Any) -> type:
    """Ids are the numbers within a split, so train and validation share them."""

    class Numbered(part):  # type: ignore[misc]
        def samples(self, split: Split) -> Sequence[Sample]:
            return [replace(sample, id=str(number)) for number, sample in enumerate(super().samples(split))]

    return Numbered


def answer_in_the_prompt(part: Any) -> type:
    """The prompt ends with the assistant's own answer."""

    class Given(part):  # type: ignore[misc]
        def samples(self, split: Split) -> Sequence[Sample]:
            return [
                replace(sample, messages=(*sample.messages, {"role": "assistant", "content": sample.answer}))
                for sample in super().samples(split)
            ]

    return Given


class _Judging:
    """Makes a mutant's class out of a change to `step`."""

    def __init__(self, change: Any) -> None:
        self.change = change

    def __call__(self, part: Any) -> type:
        change = self.change

        class Misjudging(part):  # type: ignore[misc]
            def step(self, samples: Sequence[Sample], conversations: Sequence[Sequence[Message]]) -> list[StepOutcome]:
                changed: list[StepOutcome] = change(super().step, samples, conversations)
                return changed

        return Misjudging


def _reversed(step: Any, samples: Any, conversations: Any) -> Any:
    return step(samples, conversations)[::-1]


def _last_dropped(step: Any, samples: Any, conversations: Any) -> Any:
    return step(samples, conversations)[: max(1, len(samples) - 1)]


def _constant(step: Any, samples: Any, conversations: Any) -> Any:
    return [replace(outcome, reward=1.0) for outcome in step(samples, conversations)]


def _upside_down(step: Any, samples: Any, conversations: Any) -> Any:
    return [replace(outcome, reward=-outcome.reward) for outcome in step(samples, conversations)]


def _of_the_batch(step: Any, samples: Any, conversations: Any) -> Any:
    outcomes = step(samples, conversations)
    mean = sum(outcome.reward for outcome in outcomes) / max(len(outcomes), 1)
    return [replace(outcome, reward=outcome.reward - mean) for outcome in outcomes]


def _first_turn(step: Any, samples: Any, conversations: Any) -> Any:
    cut = [turns[: len(sample.messages) + 1] for sample, turns in zip(samples, conversations, strict=True)]
    return step(samples, cut)


def _strips_in_place(step: Any, samples: Any, conversations: Any) -> Any:
    outcomes = step(samples, conversations)
    for turns in conversations:
        turns[-1]["content"] = turns[-1]["content"].strip() + " "
    return outcomes


def _pops(step: Any, samples: Any, conversations: Any) -> Any:
    outcomes = step(samples, conversations)
    for turns in conversations:
        turns.pop()
    return outcomes


def _nan_for_nothing(step: Any, samples: Any, conversations: Any) -> Any:
    return [
        outcome if turns[-1]["content"].strip() else replace(outcome, reward=float("nan"))
        for outcome, turns in zip(step(samples, conversations), conversations, strict=True)
    ]


def _dies_of_odd_text(step: Any, samples: Any, conversations: Any) -> Any:
    for turns in conversations:
        turns[-1]["content"].encode()
    return step(samples, conversations)


def _none_is_an_error(step: Any, samples: Any, conversations: Any) -> Any:
    return [step(samples, conversations)[0], *step(samples, conversations)[1:]]


def says_that_it_does_not_score(part: Any) -> type:
    """`scores` is False, and it judges all the same."""

    class Unscored(part):  # type: ignore[misc]
        def __init__(self, config: Any, *, seed: int) -> None:
            super().__init__(config, seed=seed)
            self.scores = False

    return Unscored


def takes_any_key(part: Any) -> type:
    """Its section takes keys that it does not have."""

    class AnyKey(EnvironmentConfig):
        model_config = ConfigDict(extra="allow")

    class Careless(part):  # type: ignore[misc]
        config_model = AnyKey

    return Careless


def _reads_files(section: Mapping[str, Any]) -> bool:
    return any("path" in key for key in section)


def empty_without_its_file(part: Any) -> type:
    """Data that is not there is taken for no data."""

    class Empty(part):  # type: ignore[misc]
        def __init__(self, config: Any, *, seed: int) -> None:
            try:
                super().__init__(config, seed=seed)
            except DataError:
                self._samples: dict[Split, list[Sample]] = {"train": [], "validation": []}

    return Empty


def unnamed_file(part: Any) -> type:
    """What is missing is not said."""

    class Unnamed(part):  # type: ignore[misc]
        def __init__(self, config: Any, *, seed: int) -> None:
            try:
                super().__init__(config, seed=seed)
            except DataError:
                raise DataError("the data cannot be read") from None

    return Unnamed


def shared_end(part: Any) -> type:
    """Environments share what they hold, and one that ends takes it from all."""

    class Shared(part):  # type: ignore[misc]
        ended: list[bool] = []  # noqa: RUF012  # the bug

        def samples(self, split: Split) -> Sequence[Sample]:
            return [] if self.ended else super().samples(split)

        def shutdown(self) -> None:
            self.ended.append(True)

    return Shared


_ORDER = "test_samples_come_in_the_same_order_each_time_they_are_asked_for"
_SAME = "test_the_same_configuration_and_seed_give_the_same_samples"
_IDS = "test_each_sample_has_an_id_of_its_own"
_HELD_OUT = "test_no_sample_of_validation_is_trained_on"
_WAITS = "test_a_sample_is_a_conversation_that_waits_for_the_assistant"
_REFUSED = "test_what_cannot_be_judged_is_refused"
_WORTH = "test_a_right_answer_is_worth_more_than_a_wrong_one"
_IN_ORDER = "test_outcomes_are_in_the_order_of_the_conversations"
_GROUPED = "test_a_batch_is_judged_as_its_rows_one_by_one"
_LAST = "test_the_last_turn_of_the_assistant_is_judged"
_ARGUMENTS = "test_judging_changes_no_argument"
_FINITE = "test_rewards_are_finite_whatever_the_model_writes"
_NOTHING = "test_judging_nothing_gives_nothing"
_KEY = "test_an_unknown_key_of_its_section_is_an_error"
_FILE = "test_a_missing_file_is_an_error_that_names_it"
_END = "test_it_shuts_down_and_leaves_others_alone"

MUTANTS = (
    Mutant("validation_leaks", "a sample of validation is in train too", (_HELD_OUT, _IDS), validation_leaks),
    Mutant("renamed_leak", "a sample of validation is in train under another id", (_HELD_OUT,), renamed_leak),
    Mutant("shuffled_each_time", "samples come in another order at each call", (_ORDER,), shuffled_each_time),
    Mutant("global_random_state", "samples depend on the global random state", (_SAME,), global_random_state),
    Mutant("one_id_for_all", "train and validation number their samples alike", (_IDS,), one_id_for_all),
    Mutant("answer_in_the_prompt", "the prompt holds the assistant's answer", (_WAITS,), answer_in_the_prompt),
    Mutant("outcomes_reversed", "outcomes come back in reverse", (_IN_ORDER, _GROUPED), _Judging(_reversed)),
    Mutant("last_outcome_dropped", "the last row has no outcome", (_WORTH, _IN_ORDER), _Judging(_last_dropped)),
    Mutant("constant_reward", "every answer is worth the same", (_WORTH,), _Judging(_constant)),
    Mutant("upside_down", "wrong answers are worth more than right ones", (_WORTH,), _Judging(_upside_down)),
    Mutant("reward_of_the_batch", "rewards are less the mean of the call", (_GROUPED,), _Judging(_of_the_batch)),
    Mutant("first_turn", "the first turn of the assistant is judged", (_LAST,), _Judging(_first_turn)),
    Mutant("strips_in_place", "the texts of the conversations are changed", (_ARGUMENTS,), _Judging(_strips_in_place)),
    Mutant("pops_the_answer", "the last turn is taken off the conversations", (_ARGUMENTS,), _Judging(_pops)),
    Mutant("nan_for_nothing", "an empty answer has the reward NaN", (_FINITE,), _Judging(_nan_for_nothing)),
    Mutant("dies_of_odd_text", "text that is no UTF-8 is an exception", (_FINITE,), _Judging(_dies_of_odd_text)),
    Mutant("needs_a_row", "no conversations are an IndexError", (_NOTHING,), _Judging(_none_is_an_error)),
    Mutant("judges_unscored", "it judges although `scores` is False", (_REFUSED,), says_that_it_does_not_score),
    Mutant("takes_any_key", "unknown keys of the section are taken in silence", (_KEY,), takes_any_key),
    Mutant(
        "empty_without_its_file",
        "a missing file is taken for no data",
        (_FILE,),
        empty_without_its_file,
        applies=_reads_files,
    ),
    Mutant(
        "unnamed_file", "the error does not say which file is missing", (_FILE,), unnamed_file, applies=_reads_files
    ),
    Mutant("shared_end", "a shutdown ends the other environments too", (_END,), shared_end),
)
