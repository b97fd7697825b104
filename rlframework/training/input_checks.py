"""What a run would trip over at some step, found before the first: texts without tokens, rows without room."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlframework.datasets.rendering import Rendered, has_answer, render_prompt
from rlframework.errors import ConfigError, DataError
from rlframework.huggingface.model_directories import model_positions

if TYPE_CHECKING:
    from rlframework.algorithm import Parts
    from rlframework.interfaces.environment import Sample, Split

RENDERED = 20_000
"""Up to so many samples are all rendered: about a second."""

LONGEST = 1_000
"""Of more, only so many are: the longest by characters."""

TOGETHER = 256
"""Samples that are rendered together."""

Render = Callable[[Sequence["Sample"]], list[Rendered]]


class InputCheck:
    """Renders the samples of a run once, with the tokenizer of `parts`, and holds the longest against what there is.

    A text that the tokenizer or the chat template refuses, and a row beyond the model's positions, is a `DataError`
    with the sample's id; a row beyond an explicit size of microbatches is a `ConfigError` on its key. Of more than
    `RENDERED` samples only the `LONGEST` longest are rendered, and those without an answer are told from what is known
    of them: a character that the tokenizer lacks may then be left for later, a row that is too long hardly. `fits`
    holds each batch against the same limits.
    """

    def __init__(self, parts: Parts) -> None:
        self._tokenizer, self._config = parts.tokenizer, parts.config
        policy = parts.config.policy
        self._positions = model_positions(policy.model_name, policy.trust_remote_code)

    def prompts(self, split: Split, samples: Sequence[Sample]) -> tuple[Sample, int]:
        """Each prompt leaves room for one token at least; the sample with the longest, and its tokens.

        A prompt that leaves less room than `generation.max_new_tokens` is no mistake: its answer may be shorter.
        """

        def tokens(some: Sequence[Sample]) -> list[int]:
            return [len(render_prompt(self._tokenizer, sample.messages)) for sample in some]

        sample, length = _longest(split, samples, tokens)
        if self._positions is not None and length >= self._positions:
            raise DataError(
                f"{split} sample {sample.id!r} has a prompt of {length} tokens, which leaves no room for an answer: "
                f"{self._the_model_takes()}"
            )
        return sample, length

    def rollouts(self, samples: Sequence[Sample], *, scored: bool) -> None:
        """Prompts with answers of `generation.max_new_tokens` fit into microbatches, of scoring too where `scored`."""
        sample, length = self.prompts("train", samples)
        most = length + self._config.generation.max_new_tokens
        most = most if self._positions is None else min(most, self._positions)
        what = f"train sample {sample.id!r} has a prompt of {length} tokens; with an answer the row may have {most}"
        self._fit_microbatches(what, most, scored=scored)

    def rows(self, split: Split, samples: Sequence[Sample], render: Render) -> None:
        """Rows to learn from, as `render` makes them of samples, fit into the model and into microbatches.

        And they have something to learn: a cut (`algorithm.max_tokens`) that leaves no token to train on in any of them
        is a `DataError`. Where it does so in some, stderr tells in how many.
        """
        _answered(split, samples, render)
        learnt: list[bool] = []

        def tokens(some: Sequence[Sample]) -> list[int]:
            rendered = render(some)
            learnt.extend(any(mask[1:]) for _, mask in rendered)  # nothing predicts the first token
            return [len(ids) for ids, _ in rendered]

        sample, length = _longest(split, samples, tokens)
        self._row(f"{split} sample {sample.id!r} has {length} tokens with its completion", length)
        if not any(learnt) and len(samples) > len(learnt):  # the longest prompts: are they all like that?
            tokens(_at_even_distances(samples))
        self._tell_of_cuts(split, learnt.count(False), len(learnt))

    def _tell_of_cuts(self, split: Split, nothing: int, rows: int) -> None:
        """`nothing` of the `rows` that were looked at have nothing to learn."""
        if not nothing:
            return
        limit = getattr(self._config.algorithm, "max_tokens", None)
        what = f"of {rows:,} {split} rows that were looked at, {nothing:,} have no token to train on"
        why = "" if limit is None else f": algorithm.max_tokens={limit} cuts what there was"
        if nothing == rows:
            raise DataError(f"{what}{why}; raise it, shorten the prompts, or leave such samples out")
        print(f"{what}{why}", file=sys.stderr, flush=True)

    def tokens(self, lengths: Sequence[int] | np.ndarray[Any, Any], where: str) -> None:
        """Rows of token data of these lengths fit into the model and into microbatches; `where` names the data."""
        longest = int(np.argmax(lengths))
        length = int(lengths[longest])
        self._row(f"{where}: row {longest} has {length} tokens", length)

    def fits(self, split: Split, lengths: Sequence[int], names: Sequence[str]) -> None:
        """Rows of these lengths, of the samples of these names, fit into the model and into microbatches."""
        length = max(lengths)
        self._row(f"{split} sample {names[lengths.index(length)]!r} has {length} tokens with its completion", length)

    def _row(self, what: str, length: int) -> None:
        if self._positions is not None and length > self._positions:
            raise DataError(f"{what}: {self._the_model_takes()}, or have rows cut (algorithm.max_tokens)")
        self._fit_microbatches(what, length, scored=False)

    def _the_model_takes(self) -> str:
        name = self._config.policy.model_name
        return (
            f"the model (policy.model_name={name}) takes {self._positions} tokens in all. Shorten such samples or "
            "leave them out, or take a model with more positions"
        )

    def _fit_microbatches(self, what: str, tokens: int, *, scored: bool) -> None:
        batching = self._config.policy.batching
        if batching.mode == "padded":
            return
        limits = {"policy.batching.tokens": batching.tokens}
        if scored:
            limits["policy.batching.logprob_tokens"] = batching.logprob_tokens
        for key, limit in limits.items():
            if limit is not None and tokens > limit:
                raise ConfigError(
                    f"{what}, but {key}={limit} is the most that a dynamic or packed microbatch may have: set it to at "
                    f"least {tokens}, leave it out, or leave such samples out"
                )


def worth_rendering(samples: Sequence[Sample]) -> Sequence[Sample]:
    """All of `samples`, or of more than `RENDERED` the `LONGEST` ones by characters, longest first.

    Samples that are made when they are asked for are not all made for that: those that tell their `sizes` are chosen by
    them, of others some are taken at even distances.
    """
    if len(samples) <= RENDERED:
        return samples
    if isinstance(samples, (list, tuple)):
        return sorted(samples, key=_characters, reverse=True)[:LONGEST]
    if hasattr(samples, "sizes"):
        sizes = samples.sizes()
        chosen = np.argpartition(sizes, len(sizes) - LONGEST)[-LONGEST:]
        chosen = chosen[np.argsort(-sizes[chosen], kind="stable")]
    else:
        return _at_even_distances(samples)
    return [samples[number] for number in chosen.tolist()]


def _at_even_distances(samples: Sequence[Sample]) -> list[Sample]:
    count = min(LONGEST, len(samples))
    return [samples[number] for number in np.linspace(0, len(samples) - 1, count, dtype=np.int64).tolist()]


def _answered(split: Split, samples: Sequence[Sample], render: Render) -> None:
    """Each of many samples has an answer; `render` says of the first that has none what is wrong.

    Of up to `RENDERED` samples all are rendered anyhow. Those made when they are asked for are not made for this: their
    `without_answer` tells, where there is one.
    """
    if len(samples) <= RENDERED:
        return
    if isinstance(samples, (list, tuple)):
        without = (number for number, sample in enumerate(samples) if not has_answer(sample))
    else:
        without = (number for number in getattr(samples, "without_answer", tuple)())
    number = next(without, None)
    if number is not None:
        _tokens_of(split, samples[number], lambda some: [len(ids) for ids, _ in render(some)])


def _characters(sample: Sample) -> int:
    return sum(len(message["content"]) for message in sample.messages) + len(sample.completion)


def _longest(
    split: Split, samples: Sequence[Sample], tokens: Callable[[Sequence[Sample]], list[int]]
) -> tuple[Sample, int]:
    """The sample with the most tokens, and how many they are; `tokens` counts those of some samples."""
    longest, most = None, -1
    chosen = worth_rendering(samples)
    for start in range(0, len(chosen), TOGETHER):
        some = list(chosen[start : start + TOGETHER])
        try:
            lengths = tokens(some)
        except DataError:
            lengths = [_tokens_of(split, sample, tokens) for sample in some]
        if max(lengths) > most:
            most = max(lengths)
            longest = some[lengths.index(most)]
    assert longest is not None  # there are samples
    return longest, most


def _tokens_of(split: Split, sample: Sample, tokens: Callable[[Sequence[Sample]], list[int]]) -> int:
    try:
        return tokens([sample])[0]
    except DataError as error:
        reason = str(error).removeprefix(f"sample {sample.id!r}: ")
        raise DataError(f"{split} sample {sample.id!r}: {reason}") from error
