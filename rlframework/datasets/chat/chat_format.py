"""Chat format of a model: prompts as tokens, the tokens between two turns, and the messages in completions."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, cast

from rlframework.base.errors import DataError
from rlframework.datasets.chat.call_formats import reader_of
from rlframework.datasets.chat.chat_text import ChatText, continuation
from rlframework.datasets.chat.tool_calls import ParsedCall, ParsedTurn
from rlframework.interfaces.messages import Message, Picture, ToolSpec, pictures_of, text_of

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerBase

    from rlframework.datasets.image_inputs import ImageInputs


_LARGE = 65_536
"""Characters, of which some are marks, from which on an event loop leaves a conversation's tokenisation to a thread."""


def is_large(messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> bool:
    """Return whether an event loop leaves tokenisation to a thread: of images, and of much text, calls or tools."""
    return bool(pictures_of(messages)) or len(str(messages)) + len(str(tools)) > _LARGE


def characters_of(messages: Iterable[Message]) -> int:
    """Return the number of characters of messages that every template renders: of all except the assistant's."""
    return sum(len(text_of(message)) for message in messages if message["role"] != "assistant")


class ChatFormat:
    """Converts between messages and tokens for the chat template of `tokenizer`. Sampled tokens are never rendered.

    Special tokens that users or tools spell stay text, as in `chat_text`. `images`: makes tokens and inputs of the
    model from images; None if messages have none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, images: ImageInputs | None = None) -> None:
        self._tokenizer, self._images = tokenizer, images
        self._text = ChatText(tokenizer, images)
        self._reader = reader_of(tokenizer)

    def prompt(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Return the tokens of `messages` that the model continues with its turn. `DataError` if there are none.

        Raises a `DataError` as `require_calls` does, and an `ImageError` unless each image has its tokens, one for each
        feature.
        """
        self.require_calls(tools)
        pictures = pictures_of(messages)
        ids = [*self._text.begin, *self._text.encode(self._text.render(messages, tools, prompt=True), pictures)]
        if not messages or not ids:
            raise DataError(f"the prompt {list(messages)!r} has no token; give at least one message with text")
        return self._checked(ids, pictures)

    def require_calls(self, tools: Sequence[ToolSpec]) -> None:
        """Raise a `DataError` if there are `tools`, and the calls of the chat template cannot be parsed."""
        if tools:
            self._reader.require_calls()

    def extend(
        self,
        history_ids: Sequence[int],
        messages: Sequence[Message],
        new: Sequence[Message],
        tools: Sequence[ToolSpec] = (),
    ) -> list[int] | None:
        """Return `history_ids` and the tokens of `new`, to be continued with the next turn.

        `history_ids` are the exact tokens so far and end with a sampled turn; `messages` are the conversation up to
        and including that turn. A turn that was cut off is ended first. Returns None where the template rewrites
        history, or writes another token at the end of the turn than was sampled: the caller then uses `prompt`.
        Raises an `ImageError` as `prompt` does: `history_ids` have the tokens of the images of `messages`.
        """
        added = self._added_ids(history_ids, messages, new, tools)
        return None if added is None else self._checked([*history_ids, *added], pictures_of([*messages, *new]))

    def _added_ids(
        self, history_ids: Sequence[int], messages: Sequence[Message], new: Sequence[Message], tools: Sequence[ToolSpec]
    ) -> list[int] | None:
        """Return the tokens that `extend` appends; see there."""
        pictures = pictures_of(new)
        if self._text.template is None:
            return self._text.encode(self._text.render(new), pictures, continued=True)
        found = continuation(self._text, messages, new, tools)
        if found is None:
            return None
        last = history_ids[-1] if history_ids else None
        if last in self._closing_ids:
            if last != self._tokenizer.convert_tokens_to_ids(found.end):
                return None
            # some tokenizers put a space before a text's start
            return self._text.encode(found.end + found.tail, pictures)[1:]
        return self._text.encode(found.end + found.tail, pictures, continued=True)

    def media(self, pictures: Sequence[Picture]) -> Mapping[str, Tensor]:
        """Return the inputs of the model for the images of a prompt, in order, by name; empty if it has none."""
        return self._images.processed(pictures).tensors if self._images is not None and pictures else {}

    def _checked(self, ids: list[int], pictures: Sequence[Picture]) -> list[int]:
        if self._images is not None:
            self._images.check(ids, pictures)
        return ids

    def parse(self, completion_ids: Sequence[int], tools: Sequence[ToolSpec] = (), *, position: int = 0) -> Message:
        """Return the assistant message in a completion, with the token that ended it left out.

        Without `tools`, calls that the model has written are part of the content. Calls get an id of nine characters,
        as Mistral's templates want, that depends on the completion and on `position`, the number of messages before it.
        A call that is malformed has the name that was found or none, and its text as arguments; so have several calls
        where the template writes only one in a turn. `tools` give the types of arguments that the format writes without
        quotes. Reasoning is kept apart from the content where the chat template does so. Special tokens that are part
        of neither, such as padding that was sampled, are not text, as in single turns.
        """
        ids = list(completion_ids)
        digest = blake2b(repr((position, ids)).encode()).digest()
        if ids and ids[-1] in self._closing_ids:
            ids.pop()
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        turn = self._turn(text, tools)
        if special := self._special_ids.intersection(ids):
            turn = self._without_special(turn, text, ids, special)
        if len(turn.calls) > 1 and not self._text.takes_several_calls:
            turn = replace(turn, calls=(ParsedCall("", text.strip()),))
        return turn.message([_call_id(digest, number) for number in range(len(turn.calls))])

    def _without_special(self, turn: ParsedTurn, text: str, ids: Sequence[int], special: Collection[int]) -> ParsedTurn:
        """Return `turn`, which was parsed from `text`, without the `special` ones of its tokens `ids`."""
        if turn.content == text:
            return replace(turn, content=str(self._tokenizer.decode(list(ids), skip_special_tokens=True)))
        reasoning, content = turn.reasoning, turn.content
        for token in self._tokenizer.convert_ids_to_tokens(list(special)):
            content, reasoning = content.replace(token, ""), reasoning and reasoning.replace(token, "")
        return replace(turn, content=content, reasoning=reasoning)

    def _turn(self, text: str, tools: Sequence[ToolSpec]) -> ParsedTurn:
        if self._knows_reasoning:
            opened = self._opens_reasoning and "</think>" not in text
            return self._reader.parse("<think>" + text if opened else text, tools)
        thought, closed, rest = text.partition("</think>")
        if not closed:
            return ParsedTurn(text) if text.lstrip().startswith("<think>") else self._reader.parse(text, tools)
        turn = self._reader.parse(rest, tools)
        return replace(turn, content=thought + closed + turn.content)

    def is_longer(self, messages: Sequence[Message], tokens: int) -> bool:
        """Whether `messages` have too many characters for `tokens` tokens, however long each is. Renders nothing."""
        characters = characters_of(messages)
        return characters > _LARGE and characters > tokens * self._longest_token

    @cached_property
    def _longest_token(self) -> int:
        return max(map(len, self._tokenizer.get_vocab()), default=1)

    @cached_property
    def turn_end_ids(self) -> frozenset[int]:
        """The tokens that end a turn in the chat template, for generation to stop there; without one, the end token."""
        return self._ids(self._text.turn_ends) or self._end_token

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(number for number, token in self._tokenizer.added_tokens_decoder.items() if token.special)

    @cached_property
    def _closing_ids(self) -> frozenset[int]:
        return self._ids(self._text.ends) | self._end_token

    def _ids(self, tokens: Iterable[str]) -> frozenset[int]:
        return frozenset(cast("list[int]", self._tokenizer.convert_tokens_to_ids(list(tokens))))

    @property
    def _end_token(self) -> frozenset[int]:
        end = self._tokenizer.eos_token_id
        return frozenset() if end is None else frozenset([end])

    @cached_property
    def _knows_reasoning(self) -> bool:
        template = self._text.template or ""
        return "reasoning_content" in template or "thinking" in template

    @cached_property
    def _opens_reasoning(self) -> bool:
        if self._text.template is None or not self._knows_reasoning:
            return False
        return self._text.render([{"role": "user", "content": "a"}], prompt=True).rstrip().endswith("<think>")


def _call_id(turn: bytes, number: int) -> str:
    """The id of a turn's call `number`. With 36 bits, 1,000 calls of a conversation have two alike once in 137,000."""
    return blake2b(turn, salt=number.to_bytes(8, "little"), digest_size=5).hexdigest()[:9]
