"""Estimate row lengths from a sample of the data, and from these the tokens of a step."""

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

RENDERED = 256
"""Number of evenly spaced samples that are rendered."""

LONGEST = 16
"""Number of samples with the most characters that are rendered as well, if the samples are a list."""


@dataclass(frozen=True)
class Rows:
    """The number of rows of a step, and the mean and maximum of their tokens if every answer reaches its limit.

    `generated`: the most tokens that a step generates.
    """

    count: int
    mean: float
    longest: int
    generated: int = 0

    @property
    def trained(self) -> int:
        """Tokens of all rows of a step, including prompts."""
        return round(self.count * self.mean)


def rows_of(parts: Parts) -> Rows:
    """Estimate the rows of a step. An algorithm whose configuration has `prompts_per_step` generates its rows."""
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
    lengths = [len(render_prompt(parts.tokenizer, sample.messages)) for sample in _selected(parts)]
    policy, answer = parts.config.policy, parts.config.generation.max_new_tokens
    limit = model_positions(policy.model_name, policy.trust_remote_code) or max(lengths) + answer
    rows = [min(length + answer, limit) for length in lengths]
    return Rows(count, sum(rows) / len(rows), max(rows), generated=count * answer)


def _rendered(parts: Parts) -> list[int]:
    algorithm: Any = parts.config.algorithm
    train_on: TrainOn = getattr(algorithm, "train_on", "all")
    limit = getattr(algorithm, "max_tokens", None)
    return [len(ids) for ids, _ in render_samples(parts.tokenizer, _selected(parts), train_on, limit)]


def _selected(parts: Parts) -> list[Sample]:
    samples = parts.environment.samples("train")
    if not len(samples):
        raise DataError("the environment has no train samples")
    step = max(1, -(-len(samples) // RENDERED))
    chosen = [samples[number] for number in range(0, len(samples), step)]
    if isinstance(samples, (list, tuple)):
        chosen += sorted(samples, key=_characters, reverse=True)[:LONGEST]
    return chosen


def _characters(sample: Sample) -> int:
    return sum(len(message["content"]) for message in sample.messages) + len(sample.completion)
