"""What a run would trip over at some step, found before the first: texts without tokens, rows without room."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rlframework.data.chat import render_completion, render_prompt
from rlframework.data.models import model_positions
from rlframework.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rlframework.interfaces.algorithm import Parts
    from rlframework.interfaces.environment import Sample, Split

RENDERED = 20_000
"""Up to so many samples are all rendered: about a second."""

LONGEST = 1_000
"""Of more, only so many are: the longest by characters."""


class InputCheck:
    """Renders the samples of a run once, with the tokenizer of `parts`, and holds the longest against what there is.

    A text that the tokenizer or the chat template refuses, and a row beyond the model's positions, is a `DataError`
    with the sample's id; a row beyond an explicit size of microbatches is a `ConfigError` on its key. Of more than
    `RENDERED` samples only the `LONGEST` longest are rendered: a character that the tokenizer lacks may then be left
    for later, a row that is too long hardly.
    """

    def __init__(self, parts: Parts) -> None:
        self._tokenizer, self._config = parts.tokenizer, parts.config
        policy = parts.config.policy
        self._positions = model_positions(policy.model_name, policy.trust_remote_code)

    def prompts(self, split: Split, samples: Sequence[Sample]) -> tuple[Sample, int]:
        """Each prompt leaves room for one token at least; the sample with the longest, and its tokens.

        A prompt that leaves less room than `generation.max_new_tokens` is no mistake: its answer may be shorter.
        """
        sample, length = _longest(split, samples, lambda one: len(render_prompt(self._tokenizer, one.messages)))
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

    def rows(self, samples: Sequence[Sample]) -> None:
        """Prompts with their completions fit into the model and into microbatches."""

        def tokens(sample: Sample) -> int:
            prompt = render_prompt(self._tokenizer, sample.messages)
            return len(prompt) + len(render_completion(self._tokenizer, sample))

        sample, length = _longest("train", samples, tokens)
        what = f"train sample {sample.id!r} has {length} tokens with its completion"
        if self._positions is not None and length > self._positions:
            raise DataError(f"{what}: {self._the_model_takes()}")
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
    """All of `samples`, or of more than `RENDERED` the `LONGEST` ones by characters, longest first."""
    return samples if len(samples) <= RENDERED else sorted(samples, key=_characters, reverse=True)[:LONGEST]


def _characters(sample: Sample) -> int:
    return sum(len(message["content"]) for message in sample.messages) + len(sample.completion)


def _longest(split: Split, samples: Sequence[Sample], tokens: Callable[[Sample], int]) -> tuple[Sample, int]:
    """The sample with the most tokens, and how many they are."""
    lengths = []
    for sample in (chosen := worth_rendering(samples)):
        try:
            lengths.append(tokens(sample))
        except DataError as error:
            raise DataError(f"{split} sample {sample.id!r}: {error}") from error
    most = max(lengths)
    return chosen[lengths.index(most)], most
