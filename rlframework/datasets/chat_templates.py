"""Turns of a conversation as pieces of text, each trained on or not: what a chat template makes of them.

A template is asked for whole conversations only, and what a turn adds is told from what two of them have in common.
Whatever does not fit that is a `DataError`, never a mask in the wrong place.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from rlframework.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.algorithms import TrainOn
    from rlframework.interfaces.environment import Message


@dataclass(frozen=True)
class Piece:
    """A text that is tokenised by itself, and token ids that follow it.

    `end`: the beginning of `text` that is trained on, where the rest is not: the end of a turn, then what comes next.
    `inside`: it is what a turn says, after other text; a tokenizer that puts a space before each text must not add one
    to a space that is there.
    """

    text: str
    trained: bool
    end: str = ""
    tokens: tuple[int, ...] = ()
    inside: bool = False


_PROBE = "\ue000answer\ue001"
"""Stands for an answer, where the template is asked what it puts after one: in no conversation, and no space in it."""


class Chat:
    """How `tokenizer` writes conversations: by its chat template, or the contents one after the other without one."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer

    def prefix(self, messages: Sequence[Message]) -> list[int]:
        """The begin token, where the tokenizer puts one before texts; a template writes its own."""
        return [] if messages and self._tokenizer.chat_template else self._begin

    def prompt(self, messages: Sequence[Message]) -> str:
        """What the model is given to go on from with an assistant turn."""
        if not self._tokenizer.chat_template:
            return "".join(message["content"] for message in messages)
        return self._template(messages, add_generation_prompt=True)

    def completion(self, messages: Sequence[Message], content: str) -> list[Piece]:
        """An assistant turn at the end, after `prompt(messages)`: its content and what ends it, both trained on."""
        return self._completion(messages, self.prompt(messages), content)

    def text(self, content: str) -> list[Piece]:
        """Plain text and the end token, trained on."""
        return [Piece(content, trained=True, tokens=(self._eos,))]

    def conversation(self, messages: Sequence[Message], train_on: TrainOn) -> list[Piece]:
        """`messages` up to the last assistant turn; see `chat.render_conversation`."""
        # nothing comes before a greeting, so no prompt leads to it
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant" and number]
        if not turns:
            roles = [message["role"] for message in messages]
            raise DataError(f"there is no assistant turn to train on, after a prompt; the roles are {roles}")
        last = turns[-1]
        before = self.prompt(messages[:last])
        ending = self._completion(messages[:last], before, messages[last]["content"])
        if train_on == "assistant" and len(turns) > 1:
            return [*self._history(messages, turns), *ending]
        return [Piece(before, trained=train_on == "all"), *ending]

    def _history(self, messages: Sequence[Message], turns: Sequence[int]) -> list[Piece]:
        """What comes before the last assistant turn, the other assistant turns trained on."""
        before = self.prompt(messages[: turns[0]])
        pieces = [Piece(before, trained=False)]
        for turn, following in pairwise(turns):
            after = self.prompt(messages[:following])
            content = self._as_written(after, before, messages[turn]["content"])
            start = None if content is None else before + content
            end = "" if start is None else self._end(messages[: turn + 1], start, after)
            if content is None or start is None or not after.startswith(start + end):
                raise DataError(
                    f"the chat template writes assistant turn {turn} anew once the conversation goes on (it drops "
                    "reasoning, or adds something), so no row has all turns as generation saw them. Train on the last "
                    "turn (algorithm.train_on=last), or give a policy.chat_template that keeps earlier turns"
                )
            pieces += [Piece(content, trained=True, inside=True), Piece(after[len(start) :], trained=False, end=end)]
            before = after
        return pieces

    def _completion(self, messages: Sequence[Message], before: str, content: str) -> list[Piece]:
        """The content as it was given, and as the template writes it where that puts space before it."""
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
            return [Piece(content, trained=True, tokens=(self._eos,), inside=True)]
        return [Piece(content, trained=True, inside=True), Piece(end, trained=True)]

    def _end(self, messages: Sequence[Message], start: str, after: str) -> str:
        """What ends the last turn of `messages`, whose text so far is `start`, in `after`; nothing where nothing does.

        It is looked for in the conversation that stops there: what others say later may hold such tokens too.
        """
        if not self._tokenizer.chat_template:
            return ""
        whole = self._template(messages)
        if whole.startswith(start):
            return self._special_end(whole[len(start) :])
        ends = (self._probed_end(messages[:-1]), str(self._tokenizer.eos_token))
        return next((end for end in ends if after.startswith(start + end)), "")

    def _probed_end(self, messages: Sequence[Message]) -> str:
        """What ends an assistant turn after `messages` that the template writes in another way than it was said."""
        whole = self._template([*messages, {"role": "assistant", "content": _PROBE}])
        _, found, tail = whole.rpartition(_PROBE)
        return self._special_end(tail) if found else ""

    def _special_end(self, tail: str) -> str:
        """`tail` up to and with its first special token; nothing where it has none."""
        found = self._special.search(tail)
        return tail[: found.end()] if found else ""

    @staticmethod
    def _as_written(text: str, before: str, content: str) -> str | None:
        """`content` as it stands in `text` after `before`; None: it does not.

        Itself, or without the space around it, or either with the space that a template puts before answers (Llama 2,
        Mistral, Vicuna): no prompt ends with that, so it belongs to the answer.
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
            raise DataError("the tokenizer has no end token (eos_token), so completions cannot be ended")
        return int(self._tokenizer.eos_token_id)

    def _template(self, messages: Sequence[Message], **options: Any) -> str:
        from jinja2 import TemplateError

        if not messages:
            raise DataError("a chat template needs a message to begin with; give at least one")
        plain = [{"role": message["role"], "content": message["content"]} for message in messages]
        try:
            return str(self._tokenizer.apply_chat_template(plain, tokenize=False, **options))
        except TemplateError as error:
            roles = [message["role"] for message in messages]
            raise DataError(
                f"the model's chat template refuses a conversation with the roles {roles}: {error}. Some have no "
                "system role: then leave environment.system_prompt and such turns of the data out, or give another "
                "policy.chat_template"
            ) from error
