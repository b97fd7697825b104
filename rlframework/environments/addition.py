"""Addition of whole numbers: tasks without data, for first runs and for tests.

Terms are drawn evenly. A task is held out together with all orders of its terms, so that 3+4 is never trained on when
4+3 is validated on.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import string
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rlframework.environments.verifiable import VerifiableEnvironment, prompt_messages
from rlframework.errors import DataError
from rlframework.interfaces.environment import Sample, Split

if TYPE_CHECKING:
    from rlframework.config.environments import AdditionConfig

Terms = tuple[int, ...]

_ENUMERABLE = 200_000
_INTEGER = re.compile(r"-?\d+")


class AdditionEnvironment(VerifiableEnvironment):
    """Sums as the configuration asks for, the same for the same seed."""

    def __init__(self, config: AdditionConfig, *, seed: int) -> None:
        """Make the samples. `DataError` when so many are held out that none is left to train on."""
        self._config = config
        rng = random.Random(f"addition-{seed}")
        held_out = _held_out(config, rng)
        keys = {_key(terms) for terms in held_out}
        train = list(itertools.islice(_training_tasks(config, keys, rng), config.train_samples))
        self._samples: dict[Split, list[Sample]] = {
            "train": [self._sample(terms) for terms in train],
            "validation": [self._sample(terms) for terms in held_out],
        }

    def samples(self, split: Split) -> Sequence[Sample]:
        """The tasks of `split`; `metadata["terms"]` holds the numbers."""
        return self._samples[split]

    def score(self, sample: Sample, completion: str) -> float:
        """1.0 when the answer, told from the text as `answer` says, is the sum."""
        return float(read_answer(completion, self._config.answer) == sample.answer)

    def _sample(self, terms: Terms) -> Sample:
        expression = "+".join(map(str, terms))
        letters = dict(zip(string.ascii_lowercase, terms, strict=False))
        answer = str(sum(terms))
        prompt = self._config.prompt.format(expression=expression, **letters)
        return Sample(
            id=expression,
            messages=prompt_messages(self._config.system_prompt, prompt),
            answer=answer,
            completion=answer,
            metadata={"terms": terms},
        )


def read_answer(text: str, how: str) -> str | None:
    """The answer in `text`: all of it (`exact`), or its first or last integer without leading zeros; else None."""
    if how == "exact":
        return text.strip()
    found = _INTEGER.findall(text)
    if not found:
        return None
    digits = str(found[0] if how == "first_integer" else found[-1])
    number = digits.lstrip("-").lstrip("0") or "0"
    return f"-{number}" if digits.startswith("-") and number != "0" else number


def _key(terms: Terms) -> Terms:
    return tuple(sorted(terms))


def _draw(config: AdditionConfig, rng: random.Random) -> Terms:
    low, high = config.bounds
    return tuple(rng.randint(low, high) for _ in range(config.terms))


def _held_out(config: AdditionConfig, rng: random.Random) -> list[Terms]:
    low, high = config.bounds
    available = math.comb(high - low + config.terms, config.terms)
    wanted = config.validation_samples or max(1, min(256, available // 10))
    if wanted >= available:
        raise DataError(
            f"environment.validation_samples is {wanted}, but there are only {available} different sums of "
            f"{config.terms} terms from {low} to {high}, the order of terms aside; hold out at most {available - 1}, "
            "or raise environment.digits"
        )
    return list(itertools.islice(_distinct(config, rng, seen=set()), wanted))


def _distinct(config: AdditionConfig, rng: random.Random, seen: set[Terms]) -> Iterator[Terms]:
    """Tasks of which no two have the same terms in another order."""
    while True:
        terms = _draw(config, rng)
        if _key(terms) not in seen:
            seen.add(_key(terms))
            yield terms


def _training_tasks(config: AdditionConfig, held_out: set[Terms], rng: random.Random) -> Iterator[Terms]:
    """Different ordered tasks outside `held_out`, in random order: all there are, where they can be counted out."""
    low, high = config.bounds
    if (high - low + 1) ** config.terms <= _ENUMERABLE:
        tasks = [t for t in itertools.product(range(low, high + 1), repeat=config.terms) if _key(t) not in held_out]
        rng.shuffle(tasks)
        yield from tasks
        return
    seen: set[Terms] = set()
    while True:
        terms = _draw(config, rng)
        if terms not in seen and _key(terms) not in held_out:
            seen.add(terms)
            yield terms
