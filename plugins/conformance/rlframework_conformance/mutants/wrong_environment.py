"""Broken environments: leaking or unstable samples, and wrong rewards.

They need an environment that scores; the mutants of missing files apply only to one that reads files.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ConfigDict

from rlframework.base.errors import DataError
from rlframework.config.sections import EnvironmentConfig
from rlframework.interfaces.environment import Sample, Split, StepOutcome
from rlframework.interfaces.messages import Message, text_of
from rlframework.plugins.types import Capability
from rlframework_conformance.mutants.mutant import mutant


def _broken_step(change: Callable[..., Any]) -> Callable[[Any], type]:
    """Break `step`: it returns `change(step, samples, conversations)`."""

    def break_it(part: Any) -> type:
        class Broken(part):  # type: ignore[misc]
            def step(self, samples: Sequence[Sample], conversations: Sequence[Sequence[Message]]) -> list[StepOutcome]:
                changed: list[StepOutcome] = change(super().step, samples, conversations)
                return changed

        return Broken

    return break_it


def _reads_files(section: Mapping[str, Any]) -> bool:
    return any("path" in key for key in section)


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


@mutant(
    "episodes_misdeclared",
    "The record declares episodes that the environment does not have, or not those that it has.",
    "test_episodes_are_declared",
    break_record=lambda record: replace(record, capabilities=record.capabilities ^ {Capability.EPISODES}),
)
def _episodes_misdeclared(part: Any) -> Any:
    return part


@mutant("validation_leaks", "One validation sample is also in the training split.", _HELD_OUT, _IDS)
def _validation_leaks(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def samples(self, split: Split) -> Sequence[Sample]:
            samples = list(super().samples(split))
            return list(super().samples("validation"))[:1] + samples if split == "train" else samples

    return Broken


@mutant("renamed_leak", "One validation sample is also in the training split, under another id.", _HELD_OUT)
def _renamed_leak(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def samples(self, split: Split) -> Sequence[Sample]:
            samples = list(super().samples(split))
            leaked = replace(super().samples("validation")[0], id="leaked")
            return [leaked, *samples] if split == "train" else samples

    return Broken


@mutant("shuffled_each_time", "Each call returns the samples in another order.", _ORDER)
def _shuffled_each_time(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def __init__(self, config: Any, *, seed: int) -> None:
            super().__init__(config, seed=seed)
            self._order = random.Random(seed)

        def samples(self, split: Split) -> Sequence[Sample]:
            samples = list(super().samples(split))
            self._order.shuffle(samples)
            return samples

    return Broken


@mutant("global_random_state", "The order of the samples depends on the global random state.", _SAME)
def _global_random_state(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def __init__(self, config: Any, *, seed: int) -> None:
            super().__init__(config, seed=seed)
            self._drawn = random.random()  # the bug: no generator of its own

        def samples(self, split: Split) -> Sequence[Sample]:
            samples = list(super().samples(split))
            random.Random(self._drawn).shuffle(samples)
            return samples

    return Broken


@mutant("one_id_for_all", "Training and validation samples share the same ids.", _IDS)
def _one_id_for_all(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def samples(self, split: Split) -> Sequence[Sample]:
            return [replace(sample, id=str(number)) for number, sample in enumerate(super().samples(split))]

    return Broken


@mutant("answer_in_the_prompt", "The prompt includes the assistant's answer.", _WAITS)
def _answer_in_the_prompt(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def samples(self, split: Split) -> Sequence[Sample]:
            return [
                replace(sample, messages=(*sample.messages, {"role": "assistant", "content": sample.answer}))
                for sample in super().samples(split)
            ]

    return Broken


@mutant("outcomes_reversed", "Outcomes come back in reverse order.", _IN_ORDER, _GROUPED)
@_broken_step
def _reversed(step: Any, samples: Any, conversations: Any) -> Any:
    return step(samples, conversations)[::-1]


@mutant("last_outcome_dropped", "The last row gets no outcome.", _WORTH, _IN_ORDER)
@_broken_step
def _last_dropped(step: Any, samples: Any, conversations: Any) -> Any:
    return step(samples, conversations)[: max(1, len(samples) - 1)]


@mutant("constant_reward", "Every answer gets the same reward.", _WORTH)
@_broken_step
def _constant(step: Any, samples: Any, conversations: Any) -> Any:
    return [replace(outcome, reward=1.0) for outcome in step(samples, conversations)]


@mutant("upside_down", "Wrong answers get a higher reward than right ones.", _WORTH)
@_broken_step
def _negated(step: Any, samples: Any, conversations: Any) -> Any:
    return [replace(outcome, reward=-outcome.reward) for outcome in step(samples, conversations)]


@mutant("reward_of_the_batch", "The mean reward of the call is subtracted from every reward.", _GROUPED)
@_broken_step
def _minus_batch_mean(step: Any, samples: Any, conversations: Any) -> Any:
    outcomes = step(samples, conversations)
    mean = sum(outcome.reward for outcome in outcomes) / max(len(outcomes), 1)
    return [replace(outcome, reward=outcome.reward - mean) for outcome in outcomes]


@mutant("first_turn", "The assistant's first turn is scored instead of its last.", _LAST)
@_broken_step
def _first_turn_scored(step: Any, samples: Any, conversations: Any) -> Any:
    first = [turns[: len(sample.messages) + 1] for sample, turns in zip(samples, conversations, strict=True)]
    return step(samples, first)


@mutant("strips_in_place", "Scoring modifies the texts of the conversations.", _ARGUMENTS)
@_broken_step
def _strips_texts(step: Any, samples: Any, conversations: Any) -> Any:
    outcomes = step(samples, conversations)
    for turns in conversations:
        turns[-1]["content"] = text_of(turns[-1]).strip() + " "
    return outcomes


@mutant("pops_the_answer", "Scoring removes the last turn of each conversation.", _ARGUMENTS)
@_broken_step
def _drops_last_turn(step: Any, samples: Any, conversations: Any) -> Any:
    outcomes = step(samples, conversations)
    for turns in conversations:
        turns.pop()
    return outcomes


@mutant("nan_for_nothing", "An empty answer gets the reward NaN.", _FINITE)
@_broken_step
def _nan_for_empty(step: Any, samples: Any, conversations: Any) -> Any:
    return [
        outcome if text_of(turns[-1]).strip() else replace(outcome, reward=float("nan"))
        for outcome, turns in zip(step(samples, conversations), conversations, strict=True)
    ]


@mutant("dies_of_odd_text", "Text that cannot be encoded as UTF-8 raises an exception.", _FINITE)
@_broken_step
def _raises_on_invalid_utf8(step: Any, samples: Any, conversations: Any) -> Any:
    for turns in conversations:
        text_of(turns[-1]).encode()
    return step(samples, conversations)


@mutant("needs_a_row", "An empty list of conversations raises an IndexError.", _NOTHING)
@_broken_step
def _raises_on_no_rows(step: Any, samples: Any, conversations: Any) -> Any:
    return [step(samples, conversations)[0], *step(samples, conversations)[1:]]


@mutant("judges_unscored", "The environment scores although `scores` is False.", _REFUSED)
def _scores_undeclared(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def __init__(self, config: Any, *, seed: int) -> None:
            super().__init__(config, seed=seed)
            self.scores = False

    return Broken


@mutant("takes_any_key", "Unknown keys of the section are silently accepted.", _KEY)
def _takes_any_key(part: Any) -> type:
    class AnyKey(EnvironmentConfig):
        model_config = ConfigDict(extra="allow")

    class Broken(part):  # type: ignore[misc]
        config_model = AnyKey

    return Broken


@mutant("empty_without_its_file", "A missing file is treated as an empty data set.", _FILE, applies=_reads_files)
def _empty_without_its_file(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def __init__(self, config: Any, *, seed: int) -> None:
            try:
                super().__init__(config, seed=seed)
            except DataError:
                self._samples: dict[Split, list[Sample]] = {"train": [], "validation": []}

    return Broken


@mutant("unnamed_file", "The error does not name the missing file.", _FILE, applies=_reads_files)
def _unnamed_file(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def __init__(self, config: Any, *, seed: int) -> None:
            try:
                super().__init__(config, seed=seed)
            except DataError:
                raise DataError("the data cannot be read") from None

    return Broken


@mutant("shared_end", "Shutting down one environment shuts down the others too.", _END)
def _shared_shutdown(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        closed: list[bool] = []  # noqa: RUF012  # the bug

        def samples(self, split: Split) -> Sequence[Sample]:
            return [] if self.closed else super().samples(split)

        def shutdown(self) -> None:
            self.closed.append(True)

    return Broken
