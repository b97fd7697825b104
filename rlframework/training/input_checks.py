"""Check the samples of a run before its first step: texts that cannot be tokenized, rows that are too long."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from rlframework.algorithm import Parts
from rlframework.datasets.rendering import Rendered, has_answer, render_prompt
from rlframework.errors import ConfigError, DataError
from rlframework.huggingface.model_directories import model_positions
from rlframework.interfaces.environment import Sample, Split

_LOG = logging.getLogger(__name__)

RENDERED = 20_000
"""Up to this many samples, all are rendered, which takes about a second."""

LONGEST = 1_000
"""Of larger data, only this many samples are rendered: the longest by characters."""

BATCH = 256
"""Samples per call of the tokenizer."""

Render = Callable[[Sequence["Sample"]], list[Rendered]]


class InputCheck:
    """Renders the samples of a run once, with the tokenizer of `parts`, and checks the longest against the limits.

    A text that the tokenizer or the chat template rejects, or a row beyond the model's positions, raises `DataError`
    with the sample's id. A row beyond an explicit microbatch size raises `ConfigError` with the key. Of more than
    `RENDERED` samples only the `LONGEST` longest are rendered, and missing answers are found without rendering. An
    unknown character may then go unnoticed until its batch; a row that is too long hardly ever does. `fits` checks each
    batch against the same limits.
    """

    def __init__(self, parts: Parts) -> None:
        self._tokenizer, self._config = parts.tokenizer, parts.config
        policy = parts.config.policy
        self._positions = model_positions(policy.model_name, policy.trust_remote_code)

    def prompts(self, split: Split, samples: Sequence[Sample]) -> tuple[Sample, int]:
        """Check that each prompt leaves room for a new token. Return the sample with the longest prompt and its tokens.

        A prompt that leaves less room than `generation.max_new_tokens` is allowed: its answer may be shorter.
        """
        sample, length = _longest(split, samples, lambda some: [self._prompt_tokens(sample) for sample in some])
        if self._positions is not None and length >= self._positions:
            raise DataError(
                f"{split} sample {sample.id!r} has a prompt of {length} tokens, which leaves no room for an answer: "
                f"{self._positions_limit()}"
            )
        return sample, length

    def _prompt_tokens(self, sample: Sample) -> int:
        try:
            return len(render_prompt(self._tokenizer, sample.messages))
        except DataError as error:
            raise DataError(f"sample {sample.id!r}: {error}") from error

    def rollouts(self, samples: Sequence[Sample], *, scored: bool) -> None:
        """Check that prompts with the longest answers fit into microbatches; `scored`: also into those for scoring."""
        sample, length = self.prompts("train", samples)
        most = length + self._config.generation.max_new_tokens
        most = most if self._positions is None else min(most, self._positions)
        what = (
            f"train sample {sample.id!r} has a prompt of {length} tokens; with an answer the row may have up to {most}"
        )
        self._fit_microbatches(what, most, scored=scored)

    def rows(self, split: Split, samples: Sequence[Sample], render: Render) -> None:
        """Check that the training rows that `render` makes from samples fit into the model and into microbatches.

        Truncation (`algorithm.max_tokens`) that leaves no token to train on in any row raises `DataError`; if it does
        so in some rows, their number is logged.
        """
        _answered(split, samples, render)
        trainable: list[bool] = []

        def tokens(some: Sequence[Sample]) -> list[int]:
            rendered = render(some)
            trainable.extend(any(mask[1:]) for _, mask in rendered)  # nothing predicts the first token
            return [len(ids) for ids, _ in rendered]

        sample, length = _longest(split, samples, tokens)
        self._row(f"{split} sample {sample.id!r} has {length} tokens with its completion", length)
        if not any(trainable) and len(samples) > len(trainable):  # perhaps only the longest ones are like this
            tokens(_at_even_distances(samples))
        if all(trainable):
            return
        limit = getattr(self._config.algorithm, "max_tokens", None)
        what = f"{trainable.count(False):,} of {len(trainable):,} checked {split} rows have no token to train on"
        why = "" if limit is None else f", because algorithm.max_tokens={limit} cuts them off"
        if not any(trainable):
            raise DataError(f"{what}{why}; raise it, shorten the prompts, or remove these samples")
        _LOG.warning("%s%s", what, why)

    def tokens(self, lengths: Sequence[int] | np.ndarray[Any, Any], where: str) -> None:
        """Check that rows of token data with these lengths fit into model and microbatches; `where` names the data."""
        longest = int(np.argmax(lengths))
        length = int(lengths[longest])
        self._row(f"{where}: row {longest} has {length} tokens", length)

    def fits(self, split: Split, lengths: Sequence[int], names: Sequence[str]) -> None:
        """Check that rows of these lengths, of the samples `names`, fit into the model and into microbatches."""
        length = max(lengths)
        self._row(f"{split} sample {names[lengths.index(length)]!r} has {length} tokens with its completion", length)

    def _row(self, what: str, length: int) -> None:
        if self._positions is not None and length > self._positions:
            raise DataError(f"{what}: {self._positions_limit()}, or truncate rows (algorithm.max_tokens)")
        self._fit_microbatches(what, length, scored=False)

    def _positions_limit(self) -> str:
        name = self._config.policy.model_name
        return (
            f"the model (policy.model_name={name}) takes {self._positions} tokens in total. Shorten or remove such "
            "samples, or choose a model with more positions"
        )

    def _fit_microbatches(self, what: str, tokens: int, *, scored: bool) -> None:
        batching = self._config.policy.batching
        if batching.mode == "padded":
            return
        limits = [("policy.batching.tokens", batching.tokens)]
        limits += [("policy.batching.logprob_tokens", batching.logprob_tokens)] if scored else []
        for key, limit in limits:
            if limit is not None and tokens > limit:
                raise ConfigError(
                    f"{what}, but {key}={limit} is the most that a dynamic or packed microbatch may have: set it to at "
                    f"least {tokens}, remove the key, or remove such samples"
                )


def worth_rendering(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return all of `samples`, or of more than `RENDERED` only the `LONGEST` ones by characters, longest first.

    Samples that are created on access are not all created for this: the longest are chosen by their `sizes()`, or
    evenly spaced ones if they have no such method.
    """
    if len(samples) <= RENDERED:
        return samples
    if isinstance(samples, (list, tuple)):
        return sorted(samples, key=characters, reverse=True)[:LONGEST]
    if not hasattr(samples, "sizes"):
        return _at_even_distances(samples)
    sizes = samples.sizes()
    chosen = np.argpartition(sizes, len(sizes) - LONGEST)[-LONGEST:]
    return [samples[number] for number in chosen[np.argsort(-sizes[chosen], kind="stable")].tolist()]


def characters(sample: Sample) -> int:
    """The number of characters of `sample`."""
    return sum(len(message["content"]) for message in sample.messages) + len(sample.completion)


def _at_even_distances(samples: Sequence[Sample]) -> list[Sample]:
    count = min(LONGEST, len(samples))
    return [samples[number] for number in np.linspace(0, len(samples) - 1, count, dtype=np.int64).tolist()]


def _answered(split: Split, samples: Sequence[Sample], render: Render) -> None:
    """Check that each of more than `RENDERED` samples has an answer; rendering the first without one raises the error.

    Fewer samples are all rendered anyway. Samples that are created on access are not created for this: their
    `without_answer()` is used if they have it.
    """
    if len(samples) <= RENDERED:
        return
    if isinstance(samples, (list, tuple)):
        without = (number for number, sample in enumerate(samples) if not has_answer(sample))
    else:
        without = (number for number in getattr(samples, "without_answer", tuple)())
    for number in itertools.islice(without, 1):
        _longest(split, [samples[number]], lambda some: [len(ids) for ids, _ in render(some)])


def _longest(
    split: Split, samples: Sequence[Sample], tokens: Callable[[Sequence[Sample]], list[int]]
) -> tuple[Sample, int]:
    """The sample with the most tokens and their number; `tokens` counts those of a list of samples."""
    chosen, lengths = worth_rendering(samples), []
    try:
        for start in range(0, len(chosen), BATCH):
            lengths += tokens(list(chosen[start : start + BATCH]))
    except DataError as error:
        raise DataError(f"{split} {error}") from error
    longest = int(np.argmax(lengths))
    return chosen[longest], lengths[longest]
