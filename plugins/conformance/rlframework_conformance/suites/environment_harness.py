"""The argument of the environment suite's tests: creates environments, and calls their methods."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from rlframework.config.sections import EnvironmentConfig
from rlframework.interfaces.environment import Environment, Sample, Split, StepOutcome
from rlframework.interfaces.messages import Message
from rlframework_conformance.harness import Harness
from rlframework_conformance.sections import section_of

COMPARED_SAMPLES = 2000
"""Samples of each split that are compared with each other."""


class EnvironmentHarness(Harness):
    """Creates environments from `section` and turns exceptions of their methods into failures that name the call."""

    def config(self, **changes: Any) -> EnvironmentConfig:
        """Return the environment's section with `changes`, validated as in a run's configuration."""
        section = {**self.section, **changes}
        config: Any = section_of(self.record, section, getattr(self.target, "config_model", None))
        checked: EnvironmentConfig = config
        return checked

    def make(self, seed: int = 0) -> Environment:
        """Create a new environment."""
        made: Environment = self.load_class()(self.config(), seed=seed)
        return made

    def samples(self, environment: Environment, split: Split, count: int = COMPARED_SAMPLES) -> list[Sample]:
        """Return the first samples of a split."""
        return self.must_not_raise(f"reading samples of {split}", lambda: list(environment.samples(split)[:count]))

    def step(self, environment: Environment, pairs: Sequence[tuple[Sample, Sequence[Message]]]) -> list[StepOutcome]:
        """Score pairs of a sample and a conversation about it."""
        samples, conversations = [sample for sample, _ in pairs], [conversation for _, conversation in pairs]
        return self.must_not_raise("step", lambda: environment.step(samples, conversations))

    def rewards(self, environment: Environment, pairs: Sequence[tuple[Sample, Sequence[Message]]]) -> list[float]:
        """Return the rewards of `step`, one per conversation."""
        outcomes = self.step(environment, pairs)
        self.equal("step returns one outcome per conversation", len(outcomes), len(pairs))
        return [outcome.reward for outcome in outcomes]


def right_answer(sample: Sample) -> str:
    """Return the correct reply: the sample's completion, or its answer if it has no completion."""
    return sample.completion or sample.answer


def seed_everything(seed: int) -> None:
    """Seed the global random states of Python, NumPy and torch."""
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
