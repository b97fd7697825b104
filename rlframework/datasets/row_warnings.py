"""Warnings about training rows whose rendering few want: turns without an end, and answers within a thought."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlframework.base.errors import DataError
from rlframework.config.algorithms import TrainOn
from rlframework.datasets.chat.chat_template import apply_template
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import Message, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)

_OPENING = re.compile(r"<(\|?)(START_)?(\w+)\1>\s*$")
"""Matches a tag at the end of a prompt: `<think>`, or `<|START_THINKING|>`."""


@dataclass
class _Tally:
    """A number of samples, and the id of the first."""

    count: int = 0
    first: str = ""

    def add(self, ids: Sequence[str]) -> None:
        if ids and not self.count:
            self.first = ids[0]
        self.count += len(ids)


class RowWarnings:
    """Counts the doubtful ones of the samples that it is shown, to be logged once for all.

    - Without a chat template, only the last turn of a row is ended, so of several assistant turns that are trained on
      (`train_on` other than `last`) the model would not learn to end the others.
    - Where prompts begin a thought that the template does not write before an answer, as `<think>`, an answer that
      does not end it is one within the thought.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, train_on: TrainOn) -> None:
        self._end = None if tokenizer.chat_template or train_on == "last" else tokenizer.eos_token
        self._tags = opened_thought(tokenizer)
        self._count, self._unended, self._within = 0, _Tally(), _Tally()

    def add(self, samples: Sequence[Sample]) -> None:
        """Count `samples`."""
        self._count += len(samples)
        if self._end is not None:
            self._unended.add([sample.id for sample in samples if _assistant_turns(sample) > 1])
        if self._tags is not None:
            self._within.add([sample.id for sample in samples if _lacks(sample, self._tags[1])])

    def log(self) -> None:
        """Log a warning of each kind that was found."""
        if self._unended.count:
            _LOG.warning(
                "%s of %s rows have several assistant turns (the first: sample %r) and the tokenizer has no chat "
                "template, so %r ends the last turn of a row alone: the model would not learn to end the others. Set "
                "policy.chat_template to one that ends each turn",
                f"{self._unended.count:,}",
                f"{self._count:,}",
                self._unended.first,
                self._end,
            )
        if self._within.count and self._tags is not None:
            _LOG.warning(
                "%s of %s rows have an answer without %r (the first: sample %r), but the chat template begins each "
                "prompt's answer with %r: the model would learn to answer within its thought. Give these answers "
                "their reasoning (`reasoning_content` beside `content`), or set policy.chat_template to one whose "
                "prompts begin no thought",
                f"{self._within.count:,}",
                f"{self._count:,}",
                self._tags[1],
                self._within.first,
                self._tags[0],
            )


def opened_thought(tokenizer: PreTrainedTokenizerBase) -> tuple[str, str] | None:
    """Return the tag that prompts end with and the template writes before no answer, and its closing tag, if any."""
    if not tokenizer.chat_template:
        return None
    question: Message = {"role": "user", "content": "?"}
    try:
        prompt = apply_template(tokenizer, [question], prompt=True)
        whole = apply_template(tokenizer, [question, {"role": "assistant", "content": "!"}])
    except DataError:  # raised for the first row
        return None
    found = _OPENING.search(prompt)
    if found is None or whole.startswith(prompt):
        return None
    bar, start, name = found.groups()
    return found[0].strip(), f"<{bar}END_{name}{bar}>" if start else f"</{name}>"


def _assistant_turns(sample: Sample) -> int:
    """The number of assistant turns after a prompt."""
    return bool(sample.completion) + sum(turn["role"] == "assistant" for turn in sample.messages[1:])


def _lacks(sample: Sample, closing: str) -> bool:
    """Whether the last answer of a conversation is text without the tag `closing`."""
    if not sample.messages:
        return False
    if sample.completion:
        return closing not in sample.completion
    last = next((turn for turn in reversed(sample.messages[1:]) if turn["role"] == "assistant"), None)
    structured = last is None or last.get("reasoning_content") or last.get("tool_calls")
    return not structured and last is not None and closing not in text_of(last)
