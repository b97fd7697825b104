"""Environments whose tasks are numbers: distinct seeds for training and validation, drawn from the run's seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlframework.environments.verifiable import prompt_messages
from rlframework.interfaces.environment import Environment, Sample, Split

if TYPE_CHECKING:
    from rlframework_environments.config import GymnasiumConfig, OpenEnvConfig


class SeededEnvironment(Environment):
    """Episodes whose tasks are seeds of `reset`, which all attempts at a task share: distinct numbers below 2**31.

    `prompt` is the user message of their samples. The validation numbers are drawn first, so that they do not change
    with the number of training samples.
    """

    def __init__(self, config: GymnasiumConfig | OpenEnvConfig, seed: int, prompt: str) -> None:
        held_out = config.validation_samples
        numbers = random.Random(f"tasks-{seed}").sample(range(2**31), held_out + config.train_samples)
        messages = prompt_messages(config.system_prompt, prompt)
        samples = [Sample(f"seed {number}", messages, "", metadata={"seed": number}) for number in numbers]
        self._samples: dict[Split, list[Sample]] = {"validation": samples[:held_out], "train": samples[held_out:]}

    def samples(self, split: Split) -> Sequence[Sample]:
        """The seeds of `split`, as `metadata["seed"]`."""
        return self._samples[split]
