"""Split a conversation that a chat template renders into text segments, each trained on or not.

A template renders whole conversations only, so the text of a turn is found by comparing two renderings. Where they do
not line up, a `DataError` is raised, so the mask is never misplaced.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rlframework.config.algorithms import TrainOn
from rlframework.errors import DataError
from rlframework.interfaces.environment import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Segment:
    """A text that is tokenised separately, and `tokens` to append to it.

    `end`: a prefix of `text` that is trained on while the rest is not: the end of a turn before the next one.
    `inside`: the text is the content of a turn, after other text; a tokenizer that prepends a space to each text must
    not add one to an existing space.
    """

    text: str
    trained: bool
    end: str = ""
    tokens: tuple[int, ...] = ()
    inside: bool = False


_PROBE = "\ue000answer\ue001"
"""A placeholder answer to find out what the template puts after one. Occurs in no conversation; has no spaces."""


class Chat:
    """Renders conversations with the chat template of `tokenizer`; without one, contents are concatenated."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def prefix(self, messages: Sequence[Message]) -> list[int]:
        """The beginning-of-sequence token, if the tokenizer adds one; a chat template writes its own."""
        return [] if messages and self._tokenizer.chat_template else self._begin

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that the model continues with an assistant turn."""
        if not self._tokenizer.chat_template:
            return "".join(message["content"] for message in messages)
        return self._template(messages, add_generation_prompt=True)

    def completion(self, messages: Sequence[Message], content: str) -> list[Segment]:
        """The final assistant turn after `prompt(messages)`: its content and its end, both trained on."""
        return self._completion(messages, self.prompt(messages), content)

    def text(self, content: str) -> list[Segment]:
        """Plain text and the end-of-sequence token, trained on."""
        return [Segment(content, trained=True, tokens=(self._eos,))]

    def conversation(self, messages: Sequence[Message], train_on: TrainOn) -> list[Segment]:
        """Split `messages` up to the last assistant turn; see `rendering.render_conversation`."""
        # an assistant turn at the start has no prompt
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant" and number]
        if not turns:
            roles = [message["role"] for message in messages]
            raise DataError(f"there is no assistant turn after a prompt to train on; the roles are {roles}")
        last = turns[-1]
        before = self.prompt(messages[:last])
        ending = self._completion(messages[:last], before, messages[last]["content"])
        if train_on == "assistant" and len(turns) > 1:
            return [*self._history(messages, turns), *ending]
        return [Segment(before, trained=train_on == "all"), *ending]

    def _history(self, messages: Sequence[Message], turns: Sequence[int]) -> list[Segment]:
        """The text before the last assistant turn, with the earlier assistant turns trained on."""
        before = self.prompt(messages[: turns[0]])
        segments = [Segment(before, trained=False)]
        for turn, following in pairwise(turns):
            after = self.prompt(messages[:following])
            content = self._as_written(after, before, messages[turn]["content"])
            start = None if content is None else before + content
            end = "" if start is None else self._end(messages[: turn + 1], start, after)
            if content is None or start is None or not after.startswith(start + end):
                raise DataError(
                    f"the chat template rewrites assistant turn {turn} when later turns follow (it drops reasoning, or "
                    "adds text), so no row has all turns as generation saw them. Train on the last turn only "
                    "(algorithm.train_on=last), or give a policy.chat_template that keeps earlier turns"
                )
            segments += [
                Segment(content, trained=True, inside=True),
                Segment(after[len(start) :], trained=False, end=end),
            ]
            before = after
        return segments

    def _completion(self, messages: Sequence[Message], before: str, content: str) -> list[Segment]:
        """The final assistant turn after `before`: `content` unchanged, with any space that the template prepends."""
        if not self._tokenizer.chat_template:
            return self.text(content)
        whole = self._template([*messages, {"role": "assistant", "content": content}])
        written = self._as_written(whole, before, content)
        if written is None:
            end = self._probed_end(messages)
        else:
            end = self._special_end(whole[len(before) + len(written) :])
            content = content if written in (content, content.strip()) else written
        if not end:
            return [Segment(content, trained=True, tokens=(self._eos,), inside=True)]
        return [Segment(content, trained=True, inside=True), Segment(end, trained=True)]

    def _end(self, messages: Sequence[Message], start: str, after: str) -> str:
        """The text in `after` that ends the last turn of `messages`, whose rendering so far is `start`; may be empty.

        It is searched in the conversation that stops there, since later turns may contain such tokens too.
        """
        if not self._tokenizer.chat_template:
            return ""
        whole = self._template(messages)
        if whole.startswith(start):
            return self._special_end(whole[len(start) :])
        ends = (self._probed_end(messages[:-1]), str(self._tokenizer.eos_token))
        return next((end for end in ends if after.startswith(start + end)), "")

    def _probed_end(self, messages: Sequence[Message]) -> str:
        """The end of an assistant turn after `messages`, found with `_PROBE`: the template changes the content."""
        whole = self._template([*messages, {"role": "assistant", "content": _PROBE}])
        _, found, tail = whole.rpartition(_PROBE)
        return self._special_end(tail) if found else ""

    def _special_end(self, tail: str) -> str:
        """`tail` up to and including its first special token; empty if it has none."""
        found = self._special.search(tail)
        return tail[: found.end()] if found else ""

    @staticmethod
    def _as_written(text: str, before: str, content: str) -> str | None:
        """`content` as it appears in `text` after `before`, or None if it does not.

        It may be stripped, and it may have the space that some templates put before answers (Llama 2, Mistral, Vicuna):
        no prompt ends with that space, so it belongs to the answer.
        """
        if not text.startswith(before):
            return None
        rest, bare = text[len(before) :], content.strip()
        lead = rest[: len(rest) - len(rest.lstrip())]
        forms = (content, bare, lead + content.lstrip(), lead + bare)
        return next((form for form in forms if rest.startswith(form)), None)

    @cached_property
    def _begin(self) -> list[int]:
        ids = list(self._tokenizer("")["input_ids"])
        return ids[:1] if ids and ids[0] == self._tokenizer.bos_token_id else []

    @cached_property
    def _special(self) -> re.Pattern[str]:
        added = getattr(self._tokenizer, "added_tokens_decoder", {}).values()
        names = {*self._tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))

    @cached_property
    def _eos(self) -> int:
        if self._tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-sequence token (eos_token) to end completions with; set one")
        return int(self._tokenizer.eos_token_id)

    def _template(self, messages: Sequence[Message], **options: Any) -> str:
        from jinja2 import TemplateError

        if not messages:
            raise DataError("a chat template needs at least one message")
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(plain, tokenize=False, **options))
        except TemplateError as error:
            roles = [message["role"] for message in messages]
            raise DataError(
                f"the model's chat template rejects a conversation with the roles {roles}: {error}. If it has no "
                "system role, remove environment.system_prompt and the system turns in the data, or set another "
                "policy.chat_template"
            ) from error
