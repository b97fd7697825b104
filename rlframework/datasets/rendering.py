"""Render conversations to token ids: prompts for generation, and training rows with a mask.

Prompt and completion are tokenised separately and joined, so the prompt's ids are always a prefix of the row: training
sees what generation saw, and the mask is right by construction. A chat template renders whole conversations only, so
the text of a turn is found by comparing two renderings; where they do not line up, a `DataError` is raised. If a
template rewrites earlier turns (by dropping their reasoning, say), no single row has every assistant turn after what
generation saw: training on all of them is then rejected, training on the last is not.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

from rlframework.config.algorithms import TrainOn
from rlframework.datasets.chat_template import apply_template
from rlframework.datasets.conversations import lone_surrogate
from rlframework.datasets.tools_as_text import tools_as_text
from rlframework.errors import DataError
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import Message, ToolSpec, pictures_of, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.datasets.image_inputs import ImageInputs

Rendered = tuple[list[int], list[bool]]
"""Token ids, and for each whether it is trained on."""

_PROBE = "\ue000answer\ue001"
"""A placeholder answer to find out what the template puts after one. Occurs in no conversation; has no spaces."""


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    images: ImageInputs | None = None,
) -> list[int]:
    """Return the ids that the model continues with the next assistant turn; `tools` are those that it may call.

    With a chat template, they include its generation prompt. Without one, the contents are concatenated after the
    beginning-of-sequence token, if the tokenizer adds one. `images`: puts the images of the messages in their places.
    Raises a `DataError` for an empty prompt.
    """
    chat = _Chat(_Vocabulary(tokenizer), tools)
    segments = [chat.prefix(messages), _Segment(chat.prompt(messages), trained=False)]
    [(ids, _)] = _render(tokenizer, [_with_images(segments, messages, images)])
    if not ids:
        raise DataError(f"the prompt {list(messages)!r} has no token; give at least one message with text")
    if images is not None:
        images.check(ids, pictures_of(messages))
    return ids


def render_completion(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[int]:
    """Return the ids of `sample.completion` and of the end of the turn, to follow those of `render_prompt`.

    The end is that of the chat template, if it has one, else the tokenizer's end-of-sequence token.
    """
    chat = _Chat(_Vocabulary(tokenizer), sample.tools)
    turn: Message = {"role": "assistant", "content": sample.completion}
    return _render(tokenizer, [chat.ending(sample.messages, chat.prompt(sample.messages), turn)])[0][0]


def render_steps(
    tokenizer: PreTrainedTokenizerBase, sample: Sample, steps: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Return the ids of a row whose answer consists of `steps`, and the position of the token after each step.

    Each step is tokenised by itself, so that its end is the end of a token, and the end of the turn follows the last.
    """
    chat, vocabulary = _Chat(_Vocabulary(tokenizer), sample.tools), _Vocabulary(tokenizer)
    turn: Message = {"role": "assistant", "content": "".join(steps)}
    end = _Segment("", trained=True, tokens=(vocabulary.eos,))
    if tokenizer.chat_template:
        end = chat.ending(sample.messages, chat.prompt(sample.messages), turn)[-1]
    pieces = _render(tokenizer, [[_Segment(step, trained=True)] for step in steps])
    ids, ends = render_prompt(tokenizer, sample.messages, sample.tools), []
    for piece, _ in pieces:
        ids = ids + piece
        ends.append(len(ids))
    return ids + _render(tokenizer, [[end]])[0][0], ends


def render_conversation(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    train_on: TrainOn = "last",
    tools: Sequence[ToolSpec] = (),
) -> Rendered:
    """Render a conversation, up to and including the end of its last assistant turn, as ids and mask.

    `train_on`: the mask is true on the `last` assistant turn, on every `assistant` turn, or on `all` tokens. The end of
    a turn belongs to it. With `last` and `all`, the ids before the last turn are those of `render_prompt`. With
    `assistant` they have the same text, and the same ids unless the tokenizer merges characters across turns.

    An assistant turn at the start is not trained on, since no prompt precedes it. Raises a `DataError` if there is no
    other assistant turn, and for `assistant` with a template that rewrites earlier turns.
    """
    chat = _Chat(_Vocabulary(tokenizer), tools)
    return _render(tokenizer, [_with_images(chat.conversation(messages, train_on), messages, None)])[0]


def render_samples(
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
    train_on: TrainOn = "last",
    max_tokens: int | None = None,
    images: ImageInputs | None = None,
) -> list[Rendered]:
    """Apply `render_conversation` to each sample's messages and completion, tokenising them together for speed.

    A sample without messages is plain text: its completion and the end-of-sequence token, all trained on. Rows longer
    than `max_tokens` are truncated at the end. `images`: puts the images of the messages in their places. Errors begin
    with the sample's id.
    """
    vocabulary = _Vocabulary(tokenizer)

    def rendered(some: Sequence[Sample]) -> list[Rendered]:
        segments = [_with_images(_segments(vocabulary, each, train_on), each.messages, images) for each in some]
        rows = [(ids[:max_tokens], mask[:max_tokens]) for ids, mask in _render(tokenizer, segments)]
        if images is not None:
            for (ids, _), each in zip(rows, some, strict=True):
                images.check(ids, pictures_of(each.messages))
        return rows

    try:
        return rendered(samples)
    except DataError as error:
        for sample in samples:  # find the sample to blame
            try:
                rendered([sample])
            except DataError as cause:
                raise DataError(f"sample {sample.id!r}: {cause}") from error
        raise


def end_of_turn(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the special token that ends the answer to a short prompt in the chat template; "" if there is none.

    Raises a `DataError` if the template rejects the conversation.
    """
    return _Chat(_Vocabulary(tokenizer), ()).probed_end([{"role": "user", "content": "?"}])


def has_answer(sample: Sample) -> bool:
    """Whether `sample` has something to train on: plain text, or an assistant turn after a prompt."""
    return bool(sample.completion) or any(turn["role"] == "assistant" for turn in sample.messages[1:])


@dataclass(frozen=True)
class _Segment:
    """A text that is tokenised separately, and `tokens` to append to it. The prefix `end` of `text` is trained on."""

    text: str
    trained: bool
    end: str = ""
    tokens: tuple[int, ...] = ()


class _Vocabulary:
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
        return re.compile("|".join(map(re.escape, sorted(names, key=len, reverse=True))))

    @cached_property
    def eos(self) -> int:
        """The end-of-sequence token."""
        if self.tokenizer.eos_token_id is None:
            raise DataError("the tokenizer has no end-of-sequence token (eos_token) to end completions with; set one")
        return int(self.tokenizer.eos_token_id)


class _Chat:
    """Renders conversations with the chat template of a tokenizer; without one, contents are concatenated."""

    def __init__(self, vocabulary: _Vocabulary, tools: Sequence[ToolSpec]) -> None:
        self._vocabulary, self._tokenizer, self._tools = vocabulary, vocabulary.tokenizer, tools

    def prefix(self, messages: Sequence[Message]) -> _Segment:
        """The beginning-of-sequence token, if the tokenizer adds one; a chat template writes its own."""
        return _Segment(
            "", trained=False, tokens=() if messages and self._tokenizer.chat_template else self._vocabulary.begin
        )

    def prompt(self, messages: Sequence[Message]) -> str:
        """The text that the model continues with an assistant turn."""
        if not self._tokenizer.chat_template:
            return "".join(text_of(message) for message in tools_as_text(messages, self._tools))
        return self._template(messages, prompt=True)

    def text(self, content: str) -> _Segment:
        """Plain text and the end-of-sequence token, trained on."""
        return _Segment(content, trained=True, tokens=(self._vocabulary.eos,))

    def conversation(self, messages: Sequence[Message], train_on: TrainOn) -> list[_Segment]:
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
        history = [_Segment(before, trained=train_on == "all")]
        if train_on == "assistant" and len(turns) > 1:
            history = self._history(messages, turns)
        return [self.prefix(messages), *history, *self.ending(messages[:last], before, messages[last])]

    def _history(self, messages: Sequence[Message], turns: Sequence[int]) -> list[_Segment]:
        """The text before the last assistant turn, with the earlier assistant turns trained on."""
        before = self.prompt(messages[: turns[0]])
        segments = [_Segment(before, trained=False)]
        for turn, following in pairwise(turns):
            after = self.prompt(messages[:following])
            found = self._earlier_turn(messages, turn, before, after)
            if found is None:
                raise DataError(
                    f"the chat template rewrites assistant turn {turn} when later turns follow (it drops reasoning, or "
                    "adds text), so no row has all turns as generation saw them. Train on the last turn only "
                    "(algorithm.train_on=last), or give a policy.chat_template that keeps earlier turns"
                )
            content, end = found
            rest = after[len(before) + len(content) :]
            segments += [self._content(content), _Segment(rest, trained=False, end=end)]
            before = after
        return segments

    def _earlier_turn(self, messages: Sequence[Message], turn: int, before: str, after: str) -> tuple[str, str] | None:
        """The text of an assistant turn in `after`, and that of its end; None if the template rewrote it there."""
        if _is_structured(messages[turn]):
            content, end = self._structured(messages[:turn], before, messages[turn]), ""
        else:
            written = self._as_written(after, before, text_of(messages[turn]))
            if written is None:
                return None
            content, end = written, self._end(messages[: turn + 1], before + written, after)
        return (content, end) if after.startswith(before + content + end) else None

    def ending(self, messages: Sequence[Message], before: str, turn: Message) -> list[_Segment]:
        """The final assistant turn after `before`, which is `prompt(messages)`: its content and its end.

        The content is unchanged, with any space that the template prepends.
        """
        if _is_structured(turn):
            text = self._structured(messages, before, turn)
            ended = any(found.end() == len(text) for found in self._vocabulary.special.finditer(text))
            return [_Segment(text, trained=True, tokens=() if ended else (self._vocabulary.eos,))]
        content = text_of(turn)
        if not self._tokenizer.chat_template:
            return [self.text(content)]
        whole = self._template([*messages, {"role": "assistant", "content": content}])
        written = self._as_written(whole, before, content)
        if written is None:
            end = self.probed_end(messages)
        else:
            end = self._special_end(whole[len(before) + len(written) :])
            content = content if written in (content, content.strip()) else written
        return [self._content(content), _Segment(end, trained=True, tokens=() if end else (self._vocabulary.eos,))]

    def _structured(self, messages: Sequence[Message], before: str, turn: Message) -> str:
        """The text of a turn with tool calls or reasoning after `before`, with its end, as the template writes it."""
        if not self._tokenizer.chat_template:
            raise DataError(
                "tool calls and reasoning need a chat template, and the tokenizer has none: set policy.chat_template"
            )
        whole = self._template([*messages, turn])
        if not whole.startswith(before):
            raise DataError(
                f"the chat template does not write assistant turn {len(messages)}, which has tool calls or reasoning, "
                "after the prompt that it makes for generation; give another policy.chat_template"
            )
        return whole[len(before) :].rstrip()

    def _content(self, content: str) -> _Segment:
        """The content of a turn, without a first space that the tokenizer adds to every text."""
        added = len(content) > 1 and content[0] == " " and self._vocabulary.adds_space
        return _Segment(content[1:] if added else content, trained=True)

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
        whole = self._template([*messages, {"role": "assistant", "content": _PROBE}])
        _, found, tail = whole.rpartition(_PROBE)
        return self._special_end(tail) if found else ""

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


def _segments(vocabulary: _Vocabulary, sample: Sample, train_on: TrainOn) -> list[_Segment]:
    chat = _Chat(vocabulary, sample.tools)
    if not sample.messages and sample.completion:
        return [chat.prefix(()), chat.text(sample.completion)]
    turns = list(sample.messages)
    if sample.completion:
        turns.append({"role": "assistant", "content": sample.completion})
    return chat.conversation(turns, train_on)


def _with_images(segments: list[_Segment], messages: Sequence[Message], images: ImageInputs | None) -> list[_Segment]:
    """`segments` of a conversation with its images in place of their placeholders."""
    pictures = pictures_of(messages)
    if images is None:
        if pictures:
            raise DataError("the conversation has images, which are not supported here, only in SFT and GRPO")
        return segments
    texts = images.expanded([segment.text for segment in segments], pictures)
    return [replace(segment, text=text) for segment, text in zip(segments, texts, strict=True)]


def _render(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[_Segment]]) -> list[Rendered]:
    texts = [text for row in rows for segment in row for text in (segment.text, segment.end) if text]
    encoded = iter(encode_texts(tokenizer, texts))
    rendered = []
    for row in rows:
        ids: list[int] = []
        mask: list[bool] = []
        for segment in row:
            tokens = next(encoded) if segment.text else []
            end = next(encoded) if segment.end else []
            if tokens[: len(end)] != end:  # characters merge across the boundary: tokenise separately
                tokens = end + encode_texts(tokenizer, [segment.text[len(segment.end) :]])[0]
            ids += [*tokens, *segment.tokens]
            mask += [True] * len(end) + [segment.trained] * (len(tokens) - len(end) + len(segment.tokens))
        rendered.append((ids, mask))
    return rendered


def encode_texts(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """Return the ids of each text, without added special tokens.

    Raises a `DataError` for characters that the tokenizer has no token for, and for halves of characters.
    """
    if not texts:
        return []
    try:
        return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    except Exception as error:  # the tokenizers library raises bare Exception, and TypeError for a lone surrogate
        for text in texts:
            if (half := lone_surrogate(text)) is not None:
                raise DataError(
                    f"{text!r} has a lone surrogate ({half}), half of a character, which no tokenizer accepts; fix it"
                ) from error
        if "Missing [UNK] token" not in str(error):
            raise
        raise DataError(_no_token(tokenizer, texts)) from error


def _no_token(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> str:
    """Return the message about characters of `texts` that are in no token; those of added tokens are left out."""

    def is_unknown(character: str) -> bool:
        try:
            tokenizer(character, add_special_tokens=False)
        except Exception:  # noqa: BLE001 - the tokenizers library raises bare Exception
            return True
        return False

    added = "|".join(re.escape(token) for token in sorted(tokenizer.get_added_vocab(), key=len, reverse=True))
    plain = [re.sub(added, "", text) if added else text for text in texts]
    unknown = list(filter(is_unknown, sorted(set("".join(plain)))))
    shown = next(text for text, rest in zip(texts, plain, strict=True) if not unknown or set(rest) & set(unknown))
    return f"the tokenizer has no token for {unknown} in {shown!r}; add them to its alphabet"
