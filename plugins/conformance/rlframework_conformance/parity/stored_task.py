"""A small data set from which every algorithm can make batches: sums with a right answer, a wrong one, and rewards.

A sample is a prompt for rollouts, a completion for supervised training, a pair with a margin for training on
preferences, and an answer with labelled steps. The
reward is a checksum of the answer's text, so it differs between answers of any model, and never depends on a machine.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

from rlframework.config.sections import EnvironmentConfig
from rlframework.interfaces.environment import Environment, Sample, Split, StepOutcome
from rlframework.interfaces.messages import Message, text_of

PAIRS = 48
LONGEST_ANSWER = 6
"""Characters of the longest answer."""


class StoredTask(Environment):
    """Sums of two numbers below 100, in a fixed order; the held-out ones are the last four."""

    def __init__(self, config: EnvironmentConfig, *, seed: int) -> None:
        numbers = [(7 + 13 * index % 83, 5 + 29 * index % 71) for index in range(PAIRS + 4)]
        self._samples = [_sample(str(index), *pair) for index, pair in enumerate(numbers)]

    def samples(self, split: Split) -> Sequence[Sample]:
        """See `Environment.samples`."""
        return self._samples[:PAIRS] if split == "train" else self._samples[PAIRS:]

    def step(self, samples: Sequence[Sample], conversations: Sequence[Sequence[Message]]) -> list[StepOutcome]:
        """See `Environment.step`."""
        texts = [text_of(turns[-1]) for turns in conversations]
        return [StepOutcome(zlib.crc32(text.encode()) % 1000 / 1000) for text in texts]


def _sample(name: str, first: int, second: int) -> Sample:
    total = first + second
    wrong = f"{total + 1}?" if total % 2 else f"{total - 10} or"
    prompt = Message(role="user", content=f"{first}+{second}=")
    steps = {"steps": [f"{first}", f"{total}"], "labels": [1.0, float(total % 2)]}
    metadata = {"rejected": wrong, "margin": total % 7 / 7, **steps}
    return Sample(name, (prompt,), str(total), completion=str(total), metadata=metadata)
