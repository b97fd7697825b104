"""Tasks of reasoning-gym by name, scored by their own `score_answer` in a process that can be killed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlframework.base.errors import ConfigError, UserError
from rlframework.config.environments import DatasetConfig
from rlframework.environments.own_reward import OwnReward
from rlframework.environments.verifiable import VerifiableEnvironment, prompt_messages
from rlframework.interfaces.environment import Environment, Sample, Split, StepOutcome
from rlframework.interfaces.messages import Message
from rlframework_environments.config import ReasoningGymConfig

REFUSED = frozenset({"codeio"})
"""Tasks that run programs of their data."""


class ReasoningGymEnvironment(Environment):
    """The tasks `ReasoningGymConfig.task`: questions of one turn, each made from the seed and its number."""

    def __init__(self, config: ReasoningGymConfig, *, seed: int) -> None:
        """Create the data set. Raises `ConfigError` for an unknown task, and for arguments that it refuses."""
        self._config = config
        size = config.train_samples + config.validation_samples
        data = dataset_of(config.task, {**config.arguments, "seed": seed % 2**31, "size": size})
        self._samples: dict[Split, Sequence[Sample]] = _split(
            [self._sample(number, data[number]) for number in range(size)], config
        )
        scoring = DatasetConfig(path="", reward=SCORER, reward_timeout=config.reward_timeout, max_reward_failures=1.0)
        self._reward = OwnReward(scoring, SCORER)

    def samples(self, split: Split) -> Sequence[Sample]:
        """The questions of `split`; `metadata` has the task, and the entry as `score_answer` takes it."""
        return self._samples[split]

    def step(self, samples: Sequence[Sample], conversations: Sequence[Sequence[Message]]) -> list[StepOutcome]:
        """Score the answers; `accuracy` is 1 for a score of at least 1. An answer that cannot be scored gets 0."""
        texts = VerifiableEnvironment.answers(samples, conversations)
        after = self._config.answer_after
        return self._reward.score(samples, [text.rpartition(after)[2] if after else text for text in texts])

    def shutdown(self) -> None:
        """End the process that scores."""
        self._reward.close()

    def _sample(self, number: int, entry: Mapping[str, Any]) -> Sample:
        messages = prompt_messages(self._config.system_prompt, entry["question"] + self._config.instruction)
        answer = str(entry["answer"] or "")
        task = self._config.task
        given = {"task": task, "arguments": dict(self._config.arguments), "entry": dict(entry)}
        return Sample(f"{task} {number}", messages, answer, self._config.answer_after + answer, given)


SCORER = "rlframework_environments.reasoning_gym_scores:score"
"""Imported by the process that scores, and not in the time of an answer."""


def dataset_of(task: str, arguments: Mapping[str, Any]) -> Any:
    """Create a data set. Raises `ConfigError` for an unknown task, and for arguments that it refuses."""
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            "environment.name=reasoning_gym needs reasoning-gym: pip install 'rlframework-core[reasoning-gym]'"
        ) from error
    if task in REFUSED:
        raise ConfigError(f"environment.task={task!r} runs programs to score answers, and is not supported")
    if task not in DATASETS:
        raise ConfigError(
            f"environment.task={task!r} is not a task of reasoning-gym; it has {', '.join(sorted(DATASETS))}"
        )
    try:
        return reasoning_gym.create_dataset(task, **arguments)
    except Exception as error:
        raise ConfigError(
            f"reasoning-gym refused environment.task={task!r} with {dict(arguments)}: {type(error).__name__}: {error}"
        ) from error


def _split(samples: list[Sample], config: ReasoningGymConfig) -> dict[Split, Sequence[Sample]]:
    """The first samples are for validation; training leaves out those that ask the same."""
    held_out = samples[: config.validation_samples]
    asked = {sample.messages[-1]["content"] for sample in held_out}
    train = [sample for sample in samples[len(held_out) :] if sample.messages[-1]["content"] not in asked]
    if not train:
        raise UserError(
            f"environment.task={config.task!r} has so few distinct questions that none is left to train on; lower "
            "environment.validation_samples, or set environment.arguments"
        )
    return {"train": train, "validation": held_out}
