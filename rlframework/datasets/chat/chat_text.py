"""Conversations as the text of a chat template and as tokens, in which special tokens come from the template alone.

A tool's result or a user's text may spell a special token, such as `<|im_end|>`. Tokenised as it stands, it would end
the turn and could start one in another role. So such spellings are marked before the template is rendered, and the text
is tokenised in two parts there: none of the two is the special token.

`continuation` finds the text between the model's turn and its next one, by rendering the conversation with and without
the new messages. The exact tokens of the history may be extended only if the template still writes the earlier prompt
and the model's turn; where it rewrites them, nothing is returned.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rlframework.base.errors import DataError
from rlframework.datasets.chat.chat_template import ASKED, PROBE, apply_template, template_text, tools_as_text
from rlframework.datasets.chat.chat_turns import Vocabulary, any_of
from rlframework.datasets.chat.rendering import encode_texts
from rlframework.interfaces.messages import (
    Content,
    ContentPart,
    Message,
    Picture,
    TextPart,
    ToolCall,
    ToolSpec,
    text_of,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.datasets.image_inputs import ImageInputs

_MARK = "\ue002"
"""Inserted after the first character of a spelled special token. Anywhere else it is ordinary text."""

_PROBE_CALL: ToolCall = {
    "id": "probe0000",
    "type": "function",
    "function": {"name": "f", "arguments": f'{{"a": "{PROBE}"}}'},
}


class ChatText:
    """Renders and tokenises conversations for `tokenizer`; without a chat template, contents are concatenated.

    `images`: makes tokens of images; None if messages have none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, images: ImageInputs | None = None) -> None:
        self._tokenizer, self._images = tokenizer, images
        self.template, self.vocabulary = template_text(tokenizer), Vocabulary(tokenizer)

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = (), *, prompt: bool = False) -> str:
        """Return the text of `messages`, with spelled special tokens marked; `prompt`: the model answers next.

        It has one placeholder for each image. An empty turn of the assistant is a space if the template wants content.
        """
        if self.template is None:
            messages = tools_as_text(messages, tools)
        safe = [self._safe(message) for message in messages]
        if self.template is None:
            return "".join(text_of(message) for message in safe)
        described: list[ToolSpec] = [self._marked_strings(tool) for tool in tools]
        try:
            return apply_template(self._tokenizer, safe, described, prompt=prompt)
        except DataError:
            filled = [_with_content(message) for message in safe]
            if filled == safe:
                raise
            return apply_template(self._tokenizer, filled, described, prompt=prompt)

    def encode(self, text: str, pictures: Sequence[Picture] = (), *, continued: bool = False) -> list[int]:
        """Return the tokens of `text`, as `render` returns it; `continued`: other text is before it.

        `pictures`: the images in `text`, in order. `DataError` if there is no token for a character, and unless there
        is one placeholder for each image.
        """
        if self._images is not None:
            [text] = self._images.expanded([text], pictures)
        elif pictures:
            raise DataError("a message has an image, and images are not read; set environment.images")
        parts = self._split.split(text) if _MARK in text else [text]
        first = [] if continued else encode_texts(self._tokenizer, [parts.pop(0)])[0]
        try:
            rest = encode_texts(self._tokenizer, [self._start + part for part in parts])
        except DataError:
            encode_texts(self._tokenizer, parts)  # whose error is about the text alone
            raise
        return [*first, *(token for ids in rest for token in ids[bool(self._start) :])]

    def mark(self, text: str, role: str) -> str:
        """Mark special tokens that `text` of a message of `role` spells; a system message may contain them.

        An assistant's own marks of its reasoning are kept, since templates look for them.
        """
        if role == "system":
            return text
        spelled = self._spelled_by_assistant if role == "assistant" else self._spelled
        return spelled.sub(lambda found: found[0][0] + _MARK + found[0][1:], text) if spelled else text

    @property
    def begin(self) -> tuple[int, ...]:
        """The beginning-of-sequence token of a text without chat template, if the tokenizer adds one."""
        return self.vocabulary.begin if self.template is None else ()

    @cached_property
    def turn_ends(self) -> frozenset[str]:
        """The special tokens that the template puts at the end of the last turn, an answer or a tool call."""
        answer: Message = {"role": "assistant", "content": PROBE}
        call: Message = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL]}
        ends = (self._end_of([ASKED, last], last=True) for last in (answer, call))
        return frozenset(filter(None, ends))

    @cached_property
    def ends(self) -> frozenset[str]:
        """As `turn_ends`, and the special token at the end of an answer that another message follows."""
        answer: Message = {"role": "assistant", "content": PROBE}
        return self.turn_ends | frozenset(filter(None, [self._end_of([ASKED, answer, ASKED], last=False)]))

    @cached_property
    def takes_several_calls(self) -> bool:
        """Whether the template renders a turn with several tool calls; Llama 3's raises an error."""
        calls: Message = {"role": "assistant", "content": "", "tool_calls": [_PROBE_CALL, _PROBE_CALL]}
        try:
            return self.template is None or bool(self.render([ASKED, calls]))
        except DataError:
            return False

    def _end_of(self, messages: Sequence[Message], *, last: bool) -> str | None:
        """The last or the first special token after the probe in `messages`, if there is one."""
        if self.template is None:
            return None
        try:
            text = self.render(messages)
        except DataError:  # a template without such messages has no end for them
            return None
        _, probed, rest = text.rpartition(PROBE)
        found = self.vocabulary.special.findall(rest) if probed else []
        return found[-1 if last else 0] if found else None

    def _safe(self, message: Message) -> Message:
        safe: Message = {**message, "content": self._marked_content(message)}
        if "reasoning_content" in message:
            safe["reasoning_content"] = self.mark(message["reasoning_content"], "user")
        if "tool_calls" in message:
            safe["tool_calls"] = self._marked_strings(message["tool_calls"])
        return safe

    def _marked_content(self, message: Message) -> Content:
        content, role = message["content"], message["role"]
        if isinstance(content, str):
            return self.mark(content, role)
        parts: list[ContentPart] = []
        for kind, group in groupby(content, key=lambda part: part["type"]):  # two texts may spell a token together
            some = list(group)
            text = text_of({"role": role, "content": some})
            parts += [TextPart(type="text", text=self.mark(text, role))] if kind == "text" else some
        return parts

    def _marked_strings(self, value: Any) -> Any:
        if isinstance(value, str):
            return self.mark(value, "tool")
        if isinstance(value, Mapping):
            return {self._marked_strings(key): self._marked_strings(each) for key, each in value.items()}
        return [self._marked_strings(each) for each in value] if isinstance(value, list | tuple) else value

    @cached_property
    def _added(self) -> list[Any]:
        return list(getattr(self._tokenizer, "added_tokens_decoder", {}).values())

    @cached_property
    def _start(self) -> str:
        """A special token to tokenise what follows other text: many tokenizers put a space before a text's start."""
        plain = (token for token in self._added if token.special and not token.rstrip and not token.single_word)
        return next((str(token.content) for token in plain), "")

    @cached_property
    def _spelled(self) -> re.Pattern[str] | None:
        names = {token.content for token in self._added if token.special or token.content[:1] in "<[{|"}
        return any_of(name for name in names | set(self._tokenizer.all_special_tokens) if len(name) > 1)

    @cached_property
    def _spelled_by_assistant(self) -> re.Pattern[str] | None:
        names = {token.content for token in self._added if token.special and "think" not in token.content.lower()}
        return any_of(name for name in names if len(name) > 1)

    @cached_property
    def _split(self) -> re.Pattern[str]:
        names = {token.content for token in self._added} | set(self._tokenizer.all_special_tokens)
        forms = (f"(?<={re.escape(name[0])}){_MARK}(?={re.escape(name[1:])})" for name in names if len(name) > 1)
        return re.compile("|".join(forms) or "(?!)")


def _with_content(message: Message) -> Message:
    """`message` with a space if it is an empty turn of the assistant, which Mistral's newer templates reject."""
    is_empty = message["role"] == "assistant" and not (message["content"] or message.get("tool_calls"))
    return {**message, "content": " "} if is_empty else message


_OTHER = "\ue003"
"""A content that differs from any other in its first character."""


@dataclass(frozen=True)
class Continuation:
    """The text after a sampled turn. `end`: the token that ends the turn, if there is one; `tail` follows it."""

    end: str
    tail: str


def continuation(
    chat: ChatText, messages: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec]
) -> Continuation | None:
    """Return what follows the last of `messages`, an assistant turn, if `new` follow it and the model answers next.

    None if the template rewrites what came before: a prompt that is no longer there (an earlier turn's reasoning, a
    tool list that moves), or a turn without its reasoning, content or calls.
    """
    before = chat.render(messages[:-1], tools, prompt=True)
    after = chat.render([*messages, *new], tools, prompt=True)
    other: list[Message] = [{**message, "content": _OTHER} for message in new]
    fixed = common_prefix(after, chat.render([*messages, *other], tools, prompt=True))
    if not fixed.startswith(before):
        return None
    turn = fixed[len(before) :]
    if not all(part in turn for part in _parts(chat, messages[-1])):
        return None
    if messages[-1].get("reasoning_content"):  # it may be in the rendering by chance: does the rendering depend on it?
        thought: Message = {**messages[-1], "reasoning_content": _OTHER}
        if chat.render([*messages[:-1], thought, *new], tools, prompt=True) == after:
            return None
    ends = list(chat.vocabulary.special.finditer(turn))
    found = next((end for end in reversed(ends) if end[0] in chat.ends), None)
    if found:
        return Continuation(found[0], after[len(before) + found.end() :])
    content = chat.mark(text_of(messages[-1]), "assistant").strip()
    if not content or ends:
        return None
    return Continuation("", after[len(before) + turn.index(content) + len(content) :])


def _parts(chat: ChatText, turn: Message) -> list[str]:
    """The texts of a turn that must be in its rendering."""
    parts = [chat.mark(text_of(turn), "assistant"), chat.mark(turn.get("reasoning_content", ""), "user")]
    parts += [chat.mark(call["function"]["name"], "tool") for call in turn.get("tool_calls", ())]
    return [part.strip() for part in parts]


def common_prefix(one: str, other: str) -> str:
    """Return the longest common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return one[:low]
