"""Addition of integers: a task that needs no data, for first runs and for tests.

Terms are drawn uniformly. A sum is held out together with all orders of its terms: 3+4 is never in training if 4+3 is
in validation.
"""

from __future__ import annotations

import itertools
import math
import random
import re
import string
from collections.abc import Iterator, Sequence

from rlframework.base.errors import DataError
from rlframework.config.environments import AdditionConfig
from rlframework.environments.verifiable import VerifiableEnvironment, prompt_messages
from rlframework.interfaces.environment import Sample, Split

Terms = tuple[int, ...]

_ENUMERABLE = 200_000
_INTEGER = re.compile(r"-?\d+")


class AdditionEnvironment(VerifiableEnvironment):
    """Sums as `AdditionConfig` describes them; equal seeds give equal samples."""

    def __init__(self, config: AdditionConfig, *, seed: int) -> None:
        """Generate the samples. Raises a `DataError` if the held-out sums leave none to train on."""
        self._config = config
        rng = random.Random(f"addition-{seed}")
        held_out = _held_out(config, rng)
        train = itertools.islice(_training_tasks(config, set(map(_key, held_out)), rng), config.train_samples)
        self._samples: dict[Split, list[Sample]] = {
            "train": list(map(self._sample, train)),
            "validation": list(map(self._sample, held_out)),
        }

    def samples(self, split: Split) -> Sequence[Sample]:
        """The sums of `split`, with their terms as `metadata["terms"]`."""
        return self._samples[split]

    def score(self, sample: Sample, completion: str) -> float:
        """1.0 if the answer in `completion`, found as `AdditionConfig.answer` says, is the sum, else 0.0."""
        return float(read_answer(completion, self._config.answer) == sample.answer)

    def _sample(self, terms: Terms) -> Sample:
        expression = "+".join(map(str, terms))
        values = dict(zip(string.ascii_lowercase, terms, strict=False))
        answer = str(sum(terms))
        prompt = self._config.prompt.format(expression=expression, **values)
        return Sample(
            id=expression,
            messages=prompt_messages(self._config.system_prompt, prompt),
            answer=answer,
            completion=answer,
            metadata={"terms": terms},
        )


def read_answer(text: str, how: str) -> str | None:
    """Return all of `text` (`how="exact"`), or its first or last integer without leading zeros, if it has any."""
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
            f"environment.validation_samples is {wanted}, but there are only {available} distinct sums of "
            f"{config.terms} terms from {low} to {high}, regardless of order; hold out at most {available - 1}, "
            "or raise environment.digits"
        )
    drawn: dict[Terms, Terms] = {}
    while len(drawn) < wanted:
        terms = _draw(config, rng)
        drawn.setdefault(_key(terms), terms)
    return list(drawn.values())


def _training_tasks(config: AdditionConfig, held_out: set[Terms], rng: random.Random) -> Iterator[Terms]:
    """Distinct sums outside `held_out`, in random order: all of them if they are few enough to enumerate."""
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
