"""Checks of a chat template: it writes the texts of messages, and assistant turns begin and end as in training rows.

`RowWarnings` are about training rows whose rendering few want: turns without an end, and answers within a thought.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlframework.base.errors import DataError
from rlframework.config.algorithms import TrainOn
from rlframework.datasets.chat.chat_template import apply_template
from rlframework.datasets.chat.rendering import end_of_turn
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import Message, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)

_SYSTEM: tuple[Message, ...] = ({"role": "system", "content": "!"},)


def warn_of_template(tokenizer: PreTrainedTokenizerBase, *, rows: bool) -> None:
    """Log what is wrong with the chat template, for `rows` that have answers or for prompts."""
    for problem in (start_of_turn_problem(tokenizer), end_of_turn_problem(tokenizer, rows=rows)):
        if problem is not None:
            _LOG.warning("%s", problem)


def require_contents(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a `DataError` if the chat template writes the same for any text of a user message.

    A template that rejects the probed conversations is not judged: the first row shows whether it takes those.
    """
    if not tokenizer.chat_template:
        return
    found = [_writes_text(tokenizer, before) for before in ((), _SYSTEM)]
    if True in found or False not in found:
        return
    raise DataError(
        "the chat template does not write the text of a user message: the prompt is the same whatever the text is. It "
        "probably reads a wrong field: each of `messages` has `role` and `content`, the text. Correct the template, or "
        "set policy.chat_template to another one"
    )


def end_of_turn_problem(tokenizer: PreTrainedTokenizerBase, *, rows: bool = True) -> str | None:
    """Return why no token ends the assistant turns of the chat template, and what to do; None if one does.

    `rows`: rows with answers are rendered; otherwise the model samples the answers.
    """
    try:
        if not tokenizer.chat_template or end_of_turn(tokenizer):
            return None
    except DataError:  # raised for the first row
        return None
    if not rows:
        return (
            f"the chat template ends an assistant turn with no special token, so only {tokenizer.eos_token!r} ends an "
            "answer: a model that has learned another end keeps writing until generation.max_new_tokens. Set "
            "policy.chat_template to one that ends turns as the model does"
        )
    return (
        f"the chat template ends an assistant turn with no special token, so rows end with {tokenizer.eos_token!r} "
        "instead, which the template does not write, and earlier turns with nothing: the model would not learn to end "
        f"them. Set policy.chat_template to one that ends turns with {tokenizer.eos_token!r} (in the template, "
        "eos_token), or add the template's end of turn to the tokenizer as one special token "
        "(tokenizer.add_special_tokens, then resize the model's embeddings)"
    )


def start_of_turn_problem(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return why prompts lack the beginning of an assistant turn, and what to do; None if they have it.

    Templates whose answers follow the prompt at once, as Llama 2's, need no `add_generation_prompt`. A template that
    uses it may write more before an answer, such as an empty thought, so it is not checked.
    """
    if not tokenizer.chat_template:
        return None
    question: Message = {"role": "user", "content": "?"}
    answer: Message = {"role": "assistant", "content": "!"}
    try:
        prompt = apply_template(tokenizer, [question], prompt=True)
        if prompt != apply_template(tokenizer, [question]):
            return None
        whole = apply_template(tokenizer, [question, answer])
    except DataError:  # raised for the first row
        return None
    header = whole.removeprefix(prompt).partition("!")[0]
    if not whole.startswith(prompt) or not header.strip():
        return None
    return (
        f"the chat template writes {header!r} before an answer, but not at the end of a prompt: it ignores "
        f"`add_generation_prompt`, so the model would begin its answers without it. End the template with "
        f"{{% if add_generation_prompt %}}{{{{ {header!r} }}}}{{% endif %}}"
    )


def _writes_text(tokenizer: PreTrainedTokenizerBase, before: Sequence[Message]) -> bool | None:
    """Whether the prompt depends on the text of a user message that follows `before`; None if it is rejected."""
    conversations: list[list[Message]] = [[*before, {"role": "user", "content": text}] for text in ("apple", "pear")]
    try:
        first, second = (apply_template(tokenizer, each, prompt=True) for each in conversations)
    except DataError:
        return None
    return first != second


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
