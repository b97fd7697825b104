"""A plugin that is not installed: a task on which even a random model has rewards of some variance."""

from __future__ import annotations

from rlframework.config.sections import EnvironmentConfig
from rlframework.interfaces.environment import Environment, Sample, StepOutcome
from rlframework.plugins.hookspec import hookimpl
from rlframework.plugins.types import EnvironmentRecord


class DigitsConfig(EnvironmentConfig):
    """`constant`: every answer is worth the same."""

    name: str = "digits"
    constant: bool = False


class Digits(Environment):
    """The reward is the share of digits among the characters of the answer."""

    def __init__(self, config: DigitsConfig, *, seed: int) -> None:
        self.config = config

    def samples(self, split):
        numbers = range(10, 40) if split == "train" else range(40, 50)
        return [Sample(str(n), ({"role": "user", "content": f"{n}?"},), "", completion=str(n)) for n in numbers]

    def step(self, samples, conversations):
        return [StepOutcome(self._worth(conversation[-1]["content"])) for conversation in conversations]

    def _worth(self, text: str) -> float:
        return 0.0 if self.config.constant or not text else sum(letter.isdigit() for letter in text) / len(text)


@hookimpl
def rlframework_environments():
    return [EnvironmentRecord("digits", "probe_tasks:Digits", 1, config_model=DigitsConfig)]
