"""Check the samples of a run before its first step: texts that cannot be tokenized, rows that are too long."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from rlframework.base.errors import ConfigError, DataError
from rlframework.config.sections import EnvironmentConfig
from rlframework.datasets.chat.rendering import Rendered, has_answer, render_prompt
from rlframework.datasets.chat.template_checks import require_contents, warn_of_template
from rlframework.huggingface.model_directories import model_positions
from rlframework.interfaces.environment import Sample, Split, has_episodes, runs_agents
from rlframework.interfaces.messages import pictures_of, text_of
from rlframework.rollout.parts import Parts

_LOG = logging.getLogger(__name__)

T = TypeVar("T")

RENDERED = 20_000
"""Up to this many samples, all are rendered, which takes about a second."""

LONGEST = 1_000
"""Of larger data, only this many samples are rendered: the longest by characters."""

BATCH = 256
"""Samples per call of the tokenizer."""


class InputCheck:
    """Renders the samples of a run once, with the tokenizer of `parts`, and checks the longest against the limits.

    A text that the tokenizer or the chat template rejects, or a row beyond the model's positions, raises `DataError`
    with the sample's id. A row beyond an explicit microbatch size raises `ConfigError` with the key. Of more than
    `RENDERED` samples only the `LONGEST` longest are rendered, and missing answers are found without rendering. An
    unknown character may then go unnoticed until its batch; a row that is too long hardly ever does. `fits` checks each
    batch against the same limits. The constructor raises `DataError` for a chat template that drops the texts,
    and for one whose tool calls cannot be parsed if the environment has tools.
    """

    def __init__(self, parts: Parts) -> None:
        require_contents(parts.tokenizer)
        self._tokenizer, self._config, self._images = parts.tokenizer, parts.config, parts.images
        self._episodes, self._agents = has_episodes(parts.environment), runs_agents(parts.environment)
        if self._episodes:
            _require_tool_calls(parts)
        self._policies = {"policy": parts.config.policy, **parts.config.further_policies}
        found = {
            name: model_positions(policy.model_name, policy.trust_remote_code)
            for name, policy in self._policies.items()
        }
        name = min(found, key=lambda each: found[each] or math.inf)
        self._positions = found[name]
        self._positions_limit = (
            f"the model ({name}.model_name={self._policies[name].model_name}) takes {self._positions} tokens in total. "
            "Shorten or remove such samples, or choose a model with more positions"
        )

    def prompts(self, split: Split, samples: Sequence[Sample]) -> None:
        """Check that each prompt leaves room for a new token; those of episodes are known only when they begin.

        A prompt that leaves less room than `generation.max_new_tokens` is allowed: its answer may be shorter.
        """
        if not self._episodes:
            self._longest_prompt(split, samples)

    def _longest_prompt(self, split: Split, samples: Sequence[Sample]) -> tuple[Sample, int]:
        """Check like `prompts`. Return the sample with the longest prompt, and its tokens."""
        chosen = worth_rendering(samples)
        lengths = _in_batches(split, chosen, lambda some: [self._prompt_tokens(sample) for sample in some])
        length = max(lengths)
        sample = chosen[lengths.index(length)]
        if self._positions is not None and length >= self._positions:
            raise DataError(
                f"{split} sample {sample.id!r} has a prompt of {length} tokens{self._of_images(sample)}, which leaves "
                f"no room for an answer: {self._positions_limit}"
            )
        return sample, length

    def _prompt_tokens(self, sample: Sample) -> int:
        try:
            return len(render_prompt(self._tokenizer, sample.messages, sample.tools, self._images))
        except DataError as error:
            raise DataError(f"sample {sample.id!r}: {error}") from error

    def _of_images(self, sample: Sample) -> str:
        """The part of a message that counts the tokens of the sample's images; empty without any."""
        pictures = pictures_of(sample.messages)
        return f" ({self._images.described(pictures)})" if self._images is not None and pictures else ""

    def rollouts(self, samples: Sequence[Sample], *, scored: bool) -> None:
        """Check that prompts with the longest answers fit into microbatches; `scored`: also into those for scoring.

        Of episodes, check the most tokens that they may have.
        """
        warn_of_template(self._tokenizer, rows=False)
        if self._episodes:
            limit = self._config.environment.max_episode_tokens
            limits = [each for each in (limit, self._positions) if each is not None]
            if limits:
                most = min(limits)
                self._fit_microbatches(
                    f"an episode may have up to {most} tokens (environment.max_episode_tokens, or the model's "
                    "positions)",
                    most,
                    scored=scored,
                )
            return
        if not self._agents:
            _warn_of_limits(self._config.environment)
        _warn_of_answered(samples, getattr(getattr(self._config.environment, "columns", None), "prompt", None))
        sample, length = self._longest_prompt("train", samples)
        most = length + self._config.generation.max_new_tokens
        most = most if self._positions is None else min(most, self._positions)
        what = (
            f"train sample {sample.id!r} has a prompt of {length} tokens{self._of_images(sample)}; with an answer the "
            f"row may have up to {most}"
        )
        self._fit_microbatches(what, most, scored=scored)

    def rows(
        self, split: Split, samples: Sequence[Sample], render: Callable[[Sequence[Sample]], list[Rendered]]
    ) -> None:
        """Check that the training rows that `render` makes from samples fit into the model and into microbatches.

        Truncation (`algorithm.max_tokens`) that leaves no token to train on in any row raises `DataError`; if it does
        so in some rows, their number is logged.
        """
        from rlframework.datasets.chat.template_checks import RowWarnings

        warnings = RowWarnings(self._tokenizer, getattr(self._config.algorithm, "train_on", "last"))

        def measure(some: Sequence[Sample]) -> list[tuple[int, bool]]:
            rows = [(len(ids), any(mask[1:])) for ids, mask in render(some)]  # nothing predicts the first token
            warnings.add(some)
            return rows

        if split == "train":
            warn_of_template(self._tokenizer, rows=True)
        chosen = worth_rendering(samples)
        if chosen is not samples and (number := _without_answer(samples)) is not None:
            _in_batches(split, [samples[number]], measure)  # raises the error
        rows = _in_batches(split, chosen, measure)
        if split == "train":
            warnings.log()
        self.fits(split, [length for length, _ in rows], chosen)
        if chosen is not samples and not any(trainable for _, trainable in rows):  # perhaps only the longest ones
            rows += _in_batches(split, evenly_spaced(samples, LONGEST), measure)
        without = sum(not trainable for _, trainable in rows)
        if not without:
            return
        limit = getattr(self._config.algorithm, "max_tokens", None)
        what = f"{without:,} of {len(rows):,} checked {split} rows have no token to train on"
        why = "" if limit is None else f", because algorithm.max_tokens={limit} cuts them off"
        if without == len(rows):
            raise DataError(f"{what}{why}; raise it, shorten the prompts, or remove these samples")
        _LOG.warning("%s%s", what, why)

    def tokens(self, lengths: Sequence[int] | np.ndarray[Any, Any], where: str) -> None:
        """Check that rows of token data with these lengths fit into model and microbatches; `where` names the data."""
        longest = int(np.argmax(lengths))
        length = int(lengths[longest])
        self._row(f"{where}: row {longest} has {length} tokens", length)

    def fits(self, split: Split, lengths: Sequence[int], samples: Sequence[Sample]) -> None:
        """Check that the rows of `samples`, which have these lengths, fit into the model and into microbatches."""
        length = max(lengths)
        longest = samples[lengths.index(length)]
        images = self._of_images(longest)
        self._row(f"{split} sample {longest.id!r} has {length} tokens with its completion{images}", length)

    def _row(self, what: str, length: int) -> None:
        if self._positions is not None and length > self._positions:
            raise DataError(f"{what}: {self._positions_limit}, or truncate rows (algorithm.max_tokens)")
        self._fit_microbatches(what, length, scored=False)

    def _fit_microbatches(self, what: str, tokens: int, *, scored: bool) -> None:
        limits = dict[str, int | None]()
        for name, policy in self._policies.items():
            if policy.batching.limited != "rows":
                limits[f"{name}.batching.tokens"] = policy.batching.tokens
                if scored or name != "policy":
                    limits[f"{name}.batching.logprob_tokens"] = policy.batching.logprob_tokens
        for key, limit in limits.items():
            if limit is not None and tokens > limit:
                otherwise = "lower that limit" if self._episodes else "remove such samples"
                raise ConfigError(
                    f"{what}, but {key}={limit} is the most that a dynamic or packed microbatch may have: set it to at "
                    f"least {tokens}, remove the key, or {otherwise}"
                )


def _require_tool_calls(parts: Parts) -> None:
    """Raise a `DataError` if the environment has tools, but calls in the form of the chat template cannot be parsed."""
    from rlframework.datasets.chat.call_formats import reader_of
    from rlframework.environments.tool_environment import ToolDataEnvironment

    if isinstance(parts.environment, ToolDataEnvironment):
        reader_of(parts.tokenizer).require_calls()


def worth_rendering(samples: Sequence[Sample]) -> Sequence[Sample]:
    """Return all of `samples`, or of more than `RENDERED` only `LONGEST` ones: the longest, or evenly spaced ones."""
    if len(samples) <= RENDERED:
        return samples
    return longest(samples, LONGEST) or evenly_spaced(samples, LONGEST)


def longest(samples: Sequence[Sample], count: int) -> list[Sample]:
    """The longest `count` samples by characters, longest first; none if that would create all of them on access."""
    if isinstance(samples, (list, tuple)):
        texts = ([*(text_of(message) for message in sample.messages), sample.completion] for sample in samples)
        sizes = np.array([sum(map(len, each)) for each in texts])
    elif hasattr(samples, "sizes"):
        sizes = samples.sizes()
    else:
        return []
    return [samples[number] for number in np.argsort(-sizes, kind="stable")[:count].tolist()]


def evenly_spaced(samples: Sequence[Sample], count: int) -> list[Sample]:
    """At most `count` of `samples`, with the first and the last one."""
    count = min(count, len(samples))
    return [samples[number] for number in np.linspace(0, len(samples) - 1, count, dtype=np.int64).tolist()]


def _warn_of_limits(config: EnvironmentConfig) -> None:
    """Log limits of episodes that are set for an environment of single turns."""
    fields = type(config).model_fields
    given = [name for name in ("max_turns", "max_episode_tokens") if getattr(config, name) != fields[name].default]
    for name in given:
        _LOG.warning(
            "environment.%s=%d has no effect: answers to the samples of environment %r have a single turn. Episodes "
            "need an environment that plays them (docs/episodes.md)",
            name,
            getattr(config, name),
            config.name,
        )


def _warn_of_answered(samples: Sequence[Sample], column: str | None) -> None:
    """Log how many prompts end with an answer, which is in the `column` of the row or the last of the messages."""
    looked_at = samples if len(samples) <= RENDERED else evenly_spaced(samples, LONGEST)
    found = [sample for sample in looked_at if _ends_with_answer(sample, column)]
    if found:
        _LOG.warning(
            "%d of %d checked train prompts end with an assistant turn, %r first; %s. Remove these turns",
            len(found),
            len(looked_at),
            found[0].id,
            "the model does not see it, and answers the turns before it"
            if found[0].completion
            else "the model writes another one after it",
        )


def _ends_with_answer(sample: Sample, column: str | None) -> bool:
    turns: Any = sample.metadata.get(column) if column else None
    turns = turns if isinstance(turns, list) else sample.messages
    return bool(turns) and isinstance(turns[-1], Mapping) and turns[-1].get("role") == "assistant"


def _without_answer(samples: Sequence[Sample]) -> int | None:
    """The first sample that has no answer to train on. Samples that are created on access are not created for this."""
    if isinstance(samples, (list, tuple)):
        return next((number for number, sample in enumerate(samples) if not has_answer(sample)), None)
    return next(iter(getattr(samples, "without_answer", tuple)()), None)


def _in_batches(split: Split, samples: Sequence[Sample], measure: Callable[[Sequence[Sample]], list[T]]) -> list[T]:
    """The results of `measure` for all samples; its `DataError` gets the name of the split."""
    try:
        starts = range(0, len(samples), BATCH)
        return [one for start in starts for one in measure(list(samples[start : start + BATCH]))]
    except DataError as error:
        raise DataError(f"{split} {error}") from error
