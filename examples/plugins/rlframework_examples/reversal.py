"""An environment: the right answer to `abc` is `cba`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from rlframework.base.errors import DataError
from rlframework.environments.verifiable import VerifiableEnvironment, prompt_messages
from rlframework.interfaces.environment import Sample, Split

from rlframework_examples.plugin import ReversalConfig


class Reversal(VerifiableEnvironment):
    """Words to write backwards; deterministic for a configuration and seed."""

    def __init__(self, config: ReversalConfig, *, seed: int) -> None:
        """Make all words. Raises `DataError` if a tenth of them is less than one word."""
        words = ["".join(letters) for letters in itertools.product(config.letters, repeat=config.length)]
        words = list(dict.fromkeys(words))  # `letters` may repeat a letter
        if len(words) < 10:
            raise DataError(
                f"environment.letters={config.letters!r} and environment.length={config.length} make {len(words)} "
                "words, and 10 are the least; name more letters, or a larger length"
            )
        random.Random(f"reversal-{seed}").shuffle(words)
        held_out = len(words) // 10
        samples = [self._sample(word, config.system_prompt) for word in words]
        self._samples: dict[Split, list[Sample]] = {"validation": samples[:held_out], "train": samples[held_out:]}

    @staticmethod
    def _sample(word: str, system_prompt: str | None) -> Sample:
        return Sample(word, prompt_messages(system_prompt, f"{word}="), answer=word[::-1], completion=word[::-1])

    def samples(self, split: Split) -> Sequence[Sample]:
        """The words of `split`."""
        return self._samples[split]

    def score(self, sample: Sample, completion: str) -> float:
        """The fraction of letters in the right place: 1.0 for a right answer."""
        given, answer = completion.strip(), sample.answer
        right = sum(one == other for one, other in zip(given, answer, strict=False))
        return right / max(len(given), len(answer))
