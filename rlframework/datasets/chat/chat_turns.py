"""The turns of a conversation as segments of text, found by comparing renderings of the chat template.

A chat template renders whole conversations only, so the text of a turn is the difference of two renderings; where they
do not line up, a `DataError` is raised.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from rlframework.base.errors import DataError
from rlframework.config.algorithms import TrainOn
from rlframework.datasets.chat.chat_template import apply_template, tools_as_text
from rlframework.interfaces.messages import Message, ToolSpec, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_MARK = re.compile(r"<[^<>]+>")
"""Matches a tag, such as `</think>`, and most special tokens."""

_PROBE = "\ue000answer\ue001"
"""A placeholder answer to find out what the template puts after one. Occurs in no conversation; has no spaces."""


@dataclass(frozen=True)
class Segment:
    """A text that is tokenised separately, and `tokens` to append to it. The prefix `end` of `text` is trained on."""

    text: str
    trained: bool
    end: str = ""
    tokens: tuple[int, ...] = ()


class Surroundings(NamedTuple):
    """The text that a template writes around an answer: after the prompt, and at the end of the turn."""

    lead: str
    end: str


class Vocabulary:
    """The facts about a tokenizer that rendering needs, each found out once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    @cached_property
    def begin(self) -> tuple[int, ...]:
        """The beginning-of-sequence token, if the tokenizer adds one."""
        ids = tuple(self.tokenizer("")["input_ids"])
        return ids[:1] if ids and ids[0] == self.tokenizer.bos_token_id else ()

    @cached_property
    def adds_space(self) -> bool:
        """Whether the tokenizer prepends a space to each text, as SentencePiece does."""
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        if backend is None:
            return False
        text = backend.normalizer.normalize_str("x") if backend.normalizer else "x"
        words = backend.pre_tokenizer.pre_tokenize_str(text) if backend.pre_tokenizer else [(text, (0, 1))]
        return bool(words and words[0][0] in ("▁x", "Ġx", "▁", "Ġ", " x"))

    @cached_property
    def special(self) -> re.Pattern[str]:
        """Matches a special token."""
        added = getattr(self.tokenizer, "added_tokens_decoder", {}).values()
        names = {*self.tokenizer.all_special_tokens, *(token.content for token in added if token.special)}
        return any_of(names) or re.compile(r"(?!)")

    @cached_property
    def eos(self) -> int:
        """The end-of-sequence token."""
        if self.tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-sequence token (eos_token) to end completions with; set one")
        return int(self.tokenizer.eos_token_id)


def any_of(names: Iterable[str]) -> re.Pattern[str] | None:
    """Return what matches the longest of `names` at a place; None without names."""
    found = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, found))) if found else None


class Chat:
    """Renders conversations with the chat template of a tokenizer; without one, contents are concatenated."""

    def __init__(self, vocabulary: Vocabulary, tools: Sequence[ToolSpec]) -> None:
        self._vocabulary, self._tokenizer, self._tools = vocabulary, vocabulary.tokenizer, tools

    def prefix(self, messages: Sequence[Message]) -> Segment:
        """The beginning-of-sequence token, if the tokenizer adds one; a chat template writes its own."""
        return Segment(
            "", trained=False, tokens=() if messages and self._tokenizer.chat_template else self._vocabulary.begin
        )

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that the model continues with an assistant turn."""
        if not self._tokenizer.chat_template:
            return "".join(text_of(message) for message in tools_as_text(messages, self._tools))
        return self._template(messages, prompt=True)

    def text(self, content: str) -> Segment:
        """Plain text and the end-of-sequence token, trained on."""
        return Segment(content, trained=True, tokens=(self._vocabulary.eos,))

    def conversation(self, messages: Sequence[Message], train_on: TrainOn) -> list[Segment]:
        """Split `messages` up to the last assistant turn; see `render_conversation`."""
        # an assistant turn at the start has no prompt
        turns = [number for number, message in enumerate(messages) if message["role"] == "assistant" and number]
        if not turns:
            roles = [message["role"] for message in messages]
            raise DataError(
                f"there is no assistant turn after a prompt to train on; the roles are {roles}. If rows have their "
                "answer in a column of its own, set environment.columns.completion to its name"
            )
        last = turns[-1]
        before = self.prompt(messages[:last])
        history = [Segment(before, trained=train_on == "all")]
        if train_on == "assistant" and len(turns) > 1:
            history = self._history(messages, turns)
        return [self.prefix(messages), *history, *self.ending(messages[:last], before, messages[last])]

    def _history(self, messages: Sequence[Message], turns: Sequence[int]) -> list[Segment]:
        """The text before the last assistant turn, with the earlier assistant turns trained on."""
        before = self.prompt(messages[: turns[0]])
        segments = [Segment(before, trained=False)]
        for turn, following in pairwise(turns):
            after = self.prompt(messages[:following])
            found = self._earlier_turn(messages, turn, before, after)
            if found is None:
                raise DataError(
                    f"the chat template rewrites turn {turn + 1}, of the assistant, when later turns follow (it drops "
                    "reasoning, or adds text), so no row has all turns as generation saw them. Train on the last turn "
                    "only (algorithm.train_on=last), or give a policy.chat_template that keeps earlier turns"
                )
            content, end = found
            rest = after[len(before) + len(content) :]
            segments += [self._content(content), Segment(rest, trained=False, end=end)]
            before = after
        return segments

    def _earlier_turn(self, messages: Sequence[Message], turn: int, before: str, after: str) -> tuple[str, str] | None:
        """The text of an assistant turn in `after`, and that of its end; None if the template rewrote it there."""
        if _is_structured(messages[turn]):
            content, end = self._structured(messages[:turn], before, messages[turn]), ""
        else:
            written = self._as_written(after, before, text_of(messages[turn]))
            if written is None:
                lead = self._probed(messages[:turn], before).lead
                written = self._after_lead(after, before, lead, text_of(messages[turn]))
            if written is None:
                return None
            content, end = written, self._end(messages[: turn + 1], before + written, after)
        return (content, end) if after.startswith(before + content + end) else None

    def ending(self, messages: Sequence[Message], before: str, turn: Message) -> list[Segment]:
        """The final assistant turn after `before`, which is `prompt(messages)`: its content and its end.

        The content is unchanged, after what the template writes between prompt and answer: a space, an empty thought.
        """
        if _is_structured(turn):
            text = self._structured(messages, before, turn)
            ended = any(found.end() == len(text) for found in self._vocabulary.special.finditer(text))
            return [Segment(text, trained=True, tokens=() if ended else (self._vocabulary.eos,))]
        content = text_of(turn)
        if not self._tokenizer.chat_template:
            return [self.text(content)]
        whole = self._template([*messages, {"role": "assistant", "content": content}])
        written = self._as_written(whole, before, content)
        if written is not None:
            end = self._special_end(whole[len(before) + len(written) :])
            content = content if written in (content, content.strip()) else written
        else:
            lead, end = self._probed(messages, before)
            if self._after_lead(whole, before, lead, content) is not None:
                content = lead + content
        return [self._content(content), Segment(end, trained=True, tokens=() if end else (self._vocabulary.eos,))]

    def _structured(self, messages: Sequence[Message], before: str, turn: Message) -> str:
        """The text of a turn with tool calls or reasoning after `before`, with its end, as the template writes it."""
        if not self._tokenizer.chat_template:
            raise DataError(
                "turns with tool calls or reasoning can be trained on only as a chat template writes them, and the "
                "tokenizer has none: tool calls and reasoning need a chat template, such as that of the model that you "
                "start from; set policy.chat_template to its file. With algorithm.train_on=last such turns are context"
            )
        whole = self._template([*messages, turn])
        if not whole.startswith(before):
            raise DataError(
                f"the chat template does not write turn {len(messages) + 1}, which has tool calls or reasoning, "
                "after the prompt that it makes for generation; give another policy.chat_template"
            )
        return whole[len(before) :].rstrip()

    def _content(self, content: str) -> Segment:
        """The content of a turn, without a first space that the tokenizer adds to every text."""
        added = len(content) > 1 and content[0] == " " and self._vocabulary.adds_space
        return Segment(content[1:] if added else content, trained=True)

    def _end(self, messages: Sequence[Message], start: str, after: str) -> str:
        """The text in `after` that ends the last turn of `messages`, rendered as `start` so far; may be empty."""
        if not self._tokenizer.chat_template:
            return ""
        whole = self._template(messages)  # later turns may contain such tokens too
        if whole.startswith(start):
            return self._special_end(whole[len(start) :])
        ends = (self.probed_end(messages[:-1]), str(self._tokenizer.eos_token))
        return next((end for end in ends if after.startswith(start + end)), "")

    def probed_end(self, messages: Sequence[Message]) -> str:
        """The end of an assistant turn after `messages`, found with `_PROBE`: the template changes the content."""
        return self._probed(messages).end

    def _probed(self, messages: Sequence[Message], before: str | None = None) -> Surroundings:
        """Return what the template writes around an answer after `messages`; the lead follows `before`, the prompt."""
        whole = self._template([*messages, {"role": "assistant", "content": _PROBE}])
        head, found, tail = whole.rpartition(_PROBE)
        lead = head[len(before) :] if found and before is not None and head.startswith(before) else ""
        return Surroundings(lead, self._special_end(tail) if found else "")

    def _after_lead(self, text: str, before: str, lead: str, content: str) -> str | None:
        """`lead` and `content` as they appear in `text` after `before`, if they do.

        None too if the content has the mark that ends the lead: it brings its own thought, or names its channel.
        """
        marks = _MARK.findall(lead)
        if not lead or (marks and marks[-1] in content):
            return None
        written = self._as_written(text, before + lead, content)
        return None if written is None else lead + written

    def _special_end(self, tail: str) -> str:
        """`tail` up to and including its first special token; empty if it has none."""
        found = self._vocabulary.special.search(tail)
        return tail[: found.end()] if found else ""

    @staticmethod
    def _as_written(text: str, before: str, content: str) -> str | None:
        """`content` as it appears in `text` after `before`, if it does: perhaps stripped, perhaps after a space.

        Llama 2, Mistral and Vicuna put that space before answers. No prompt ends with it: it belongs to the answer.
        """
        if not text.startswith(before):
            return None
        rest, bare = text[len(before) :], content.strip()
        lead = rest[: len(rest) - len(rest.lstrip())]
        forms = (content, bare, lead + content.lstrip(), lead + bare)
        return next((form for form in forms if rest.startswith(form)), None)

    def _template(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        return apply_template(self._tokenizer, messages, self._tools, prompt=prompt)


def _is_structured(turn: Message) -> bool:
    """Whether a turn has more than text, so that only the template knows how it is written."""
    return bool(turn.get("tool_calls") or turn.get("reasoning_content"))
