"""Broken environments: leaking or unstable samples, and wrong rewards.

They need an environment that scores; the mutants of missing files apply only to one that reads files.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from pydantic import ConfigDict

from rlframework.base.errors import DataError
from rlframework.config.sections import EnvironmentConfig
from rlframework.interfaces.environment import Environment, Split, StepOutcome
from rlframework.interfaces.messages import text_of
from rlframework.plugins.types import Capability
from rlframework_conformance.mutants.mutant import after, around, mutant, result


def _reads_files(section: Mapping[str, Any]) -> bool:
    return any("path" in key for key in section)


@mutant(
    "episodes_misdeclared",
    "The record declares episodes that the environment does not have, or not those that it has.",
    break_record=lambda record: replace(record, capabilities=record.capabilities ^ {Capability.EPISODES}),
)
def _episodes_misdeclared(part: Any) -> Any:
    return part


def _minus_the_mean(outcomes: Sequence[StepOutcome]) -> list[StepOutcome]:
    mean = sum(outcome.reward for outcome in outcomes) / max(len(outcomes), 1)
    return [replace(outcome, reward=outcome.reward - mean) for outcome in outcomes]


MUTANTS = (
    mutant("one_id_for_all", "Training and validation samples share the same ids.")(
        result(
            Environment.samples,
            lambda samples: [replace(sample, id=str(number)) for number, sample in enumerate(samples)],
        )
    ),
    mutant("answer_in_the_prompt", "The prompt includes the assistant's answer.")(
        result(
            Environment.samples,
            lambda samples: [
                replace(sample, messages=(*sample.messages, {"role": "assistant", "content": sample.answer}))
                for sample in samples
            ],
        )
    ),
    mutant("outcomes_reversed", "Outcomes come back in reverse order.")(
        result(Environment.step, lambda outcomes: outcomes[::-1])
    ),
    mutant("last_outcome_dropped", "The last row gets no outcome.")(
        result(Environment.step, lambda outcomes: outcomes[: max(1, len(outcomes) - 1)])
    ),
    mutant("constant_reward", "Every answer gets the same reward.")(
        result(Environment.step, lambda outcomes: [replace(outcome, reward=1.0) for outcome in outcomes])
    ),
    mutant("upside_down", "Wrong answers get a higher reward than right ones.")(
        result(Environment.step, lambda outcomes: [replace(outcome, reward=-outcome.reward) for outcome in outcomes])
    ),
    mutant("reward_of_the_batch", "The mean reward of the call is subtracted from every reward.")(
        result(Environment.step, _minus_the_mean)
    ),
    mutant("judges_unscored", "The environment scores although `scores` is False.")(
        after(Environment.__init__, lambda environment: setattr(environment, "scores", False))
    ),
)


@mutant("validation_leaks", "One validation sample is also in the training split.")
@around(Environment.samples)
def _validation_leaks(samples: Any, _: Any, split: Split) -> Any:
    return [*samples("validation")[:1], *samples(split)] if split == "train" else samples(split)


@mutant("renamed_leak", "One validation sample is also in the training split, under another id.")
@around(Environment.samples)
def _renamed_leak(samples: Any, _: Any, split: Split) -> Any:
    return [replace(samples("validation")[0], id="leaked"), *samples(split)] if split == "train" else samples(split)


@mutant("shuffled_each_time", "Each call returns the samples in another order.")
@around(Environment.samples)
def _shuffled_each_time(samples: Any, environment: Any, split: Split) -> Any:
    order = environment.__dict__.setdefault("order", random.Random(0))
    return order.sample(sound := list(samples(split)), len(sound))


@mutant("global_random_state", "The order of the samples depends on the global random state.")
@around(Environment.samples)
def _global_random_state(samples: Any, environment: Any, split: Split) -> Any:
    drawn = environment.__dict__.setdefault("drawn", random.random())
    return random.Random(drawn).sample(sound := list(samples(split)), len(sound))


@mutant("first_turn", "The assistant's first turn is scored instead of its last.")
@around(Environment.step)
def _first_turn_scored(step: Any, _: Any, samples: Any, conversations: Any) -> Any:
    return step(samples, [turns[: len(one.messages) + 1] for one, turns in zip(samples, conversations, strict=True)])


@mutant("strips_in_place", "Scoring modifies the texts of the conversations.")
@around(Environment.step)
def _strips_texts(step: Any, _: Any, samples: Any, conversations: Any) -> Any:
    outcomes = step(samples, conversations)
    for turns in conversations:
        turns[-1]["content"] = text_of(turns[-1]).strip() + " "
    return outcomes


@mutant("pops_the_answer", "Scoring removes the last turn of each conversation.")
@around(Environment.step)
def _drops_last_turn(step: Any, _: Any, samples: Any, conversations: Any) -> Any:
    outcomes = step(samples, conversations)
    for turns in conversations:
        turns.pop()
    return outcomes


@mutant("nan_for_nothing", "An empty answer gets the reward NaN.")
@around(Environment.step)
def _nan_for_empty(step: Any, _: Any, samples: Any, conversations: Any) -> Any:
    return [
        outcome if text_of(turns[-1]).strip() else replace(outcome, reward=float("nan"))
        for outcome, turns in zip(step(samples, conversations), conversations, strict=True)
    ]


@mutant("dies_of_odd_text", "Text that cannot be encoded as UTF-8 raises an exception.")
@around(Environment.step)
def _raises_on_invalid_utf8(step: Any, _: Any, samples: Any, conversations: Any) -> Any:
    for turns in conversations:
        text_of(turns[-1]).encode()
    return step(samples, conversations)


@mutant("needs_a_row", "An empty list of conversations raises an IndexError.")
@around(Environment.step)
def _raises_on_no_rows(step: Any, _: Any, samples: Any, conversations: Any) -> Any:
    return [step(samples, conversations)[0], *step(samples, conversations)[1:]]


class _AnyKey(EnvironmentConfig):
    model_config = ConfigDict(extra="allow")


@mutant("takes_any_key", "Unknown keys of the section are silently accepted.")
def _takes_any_key(part: Any) -> type:
    return type("Broken", (part,), {"config_model": _AnyKey})


@mutant("empty_without_its_file", "A missing file is treated as an empty data set.", applies=_reads_files)
@around(Environment.__init__)
def _empty_without_its_file(construct: Any, environment: Any, config: Any, *, seed: int) -> None:
    try:
        construct(config, seed=seed)
    except DataError:
        environment._samples = {"train": [], "validation": []}


@mutant("unnamed_file", "The error does not name the missing file.", applies=_reads_files)
@around(Environment.__init__)
def _unnamed_file(construct: Any, _: Any, config: Any, *, seed: int) -> None:
    try:
        construct(config, seed=seed)
    except DataError:
        raise DataError("the data cannot be read") from None


@mutant("shared_end", "Shutting down one environment shuts down the others too.")
@around(Environment.samples, Environment.shutdown)
def _shared_shutdown(call: Any, environment: Any, *split: Split) -> Any:
    if split:
        return [] if getattr(type(environment), "closed", False) else call(*split)
    type(environment).closed = True
    return None
