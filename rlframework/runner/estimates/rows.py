"""How long a run's rows are, from some of its data, and with that how many tokens a step takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlframework.datasets.rendering import render_prompt, render_samples
from rlframework.datasets.tokens.reading import TokenData
from rlframework.errors import DataError
from rlframework.huggingface.model_directories import model_positions

if TYPE_CHECKING:
    from rlframework.algorithm import Parts
    from rlframework.config.algorithms import TrainOn
    from rlframework.interfaces.environment import Sample

LOOKED_AT = 256
"""So many samples at even distances are rendered, and of lists the longest by characters besides."""

LONGEST = 16


@dataclass(frozen=True)
class Rows:
    """Rows of one step, and tokens of each: on average, and of the longest that was seen; with answers at their limit.

    `generated`: the most tokens that a step generates, 0 where it generates none. `prompts`: different prompts.
    """

    count: int
    mean: float
    longest: int
    generated: int = 0

    @property
    def trained(self) -> int:
        """Tokens that a step trains on, prompts included."""
        return round(self.count * self.mean)


def rows_of(parts: Parts) -> Rows:
    """The rows of a step of the run of `parts`; an algorithm that has `prompts_per_step` generates its rows."""
    algorithm, policy = parts.config.algorithm, parts.config.policy
    prompts = getattr(algorithm, "prompts_per_step", None)
    if prompts is not None:
        count = prompts * getattr(algorithm, "samples_per_prompt", 1)
        return _generated(parts, count)
    token_data = getattr(algorithm, "token_data", None)
    lengths: Sequence[int] = (
        _rendered(parts) if token_data is None else [int(length) for length in TokenData(token_data).lengths]
    )
    return Rows(policy.train_global_batch_size, sum(lengths) / len(lengths), max(lengths))


def _generated(parts: Parts, count: int) -> Rows:
    lengths = [len(render_prompt(parts.tokenizer, sample.messages)) for sample in _some(parts)]
    policy, answer = parts.config.policy, parts.config.generation.max_new_tokens
    most = model_positions(policy.model_name, policy.trust_remote_code) or max(lengths) + answer
    rows = [min(length + answer, most) for length in lengths]
    return Rows(count, sum(rows) / len(rows), max(rows), generated=count * answer)


def _rendered(parts: Parts) -> list[int]:
    algorithm: Any = parts.config.algorithm
    train_on: TrainOn = getattr(algorithm, "train_on", "all")
    most = getattr(algorithm, "max_tokens", None)
    return [len(ids) for ids, _ in render_samples(parts.tokenizer, _some(parts), train_on, most)]


def _some(parts: Parts) -> list[Sample]:
    samples = parts.environment.samples("train")
    if not len(samples):
        raise DataError("there are no train samples")
    step = max(1, -(-len(samples) // LOOKED_AT))
    chosen = [samples[number] for number in range(0, len(samples), step)]
    if isinstance(samples, (list, tuple)):
        chosen += sorted(samples, key=_characters, reverse=True)[:LONGEST]
    return chosen


def _characters(sample: Sample) -> int:
    return sum(len(message["content"]) for message in sample.messages) + len(sample.completion)
