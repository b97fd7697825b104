"""Render conversations to token ids: prompts for generation, and training rows with a mask.

Prompt and completion are tokenised separately and joined, so the prompt's ids are always a prefix of the row: training
sees what generation saw, and the mask is right by construction. If a template rewrites earlier turns (by dropping their
reasoning, say), no single row has every assistant turn after what generation saw: training on all of them is then
rejected, training on the last is not.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlframework.base.errors import DataError
from rlframework.config.algorithms import TrainOn
from rlframework.config.problems import shortened
from rlframework.datasets.chat.chat_turns import Chat, Segment, Vocabulary
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import Message, ToolSpec, pictures_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.datasets.image_inputs import ImageInputs

Rendered = tuple[list[int], list[bool]]
"""Token ids, and for each whether it is trained on."""


def render_prompt(
    tokenizer: PreTrainedTokenizerBase,
    messages: Sequence[Message],
    tools: Sequence[ToolSpec] = (),
    images: ImageInputs | None = None,
) -> list[int]:
    """Return the ids that the model continues with the next assistant turn; `tools` are those that it may call.

    With a chat template, they include its generation prompt. Without one, the contents are concatenated after the
    beginning-of-sequence token, if the tokenizer adds one. `images`: puts the images of the messages in their places.
    Raises a `DataError` for an empty prompt, and for text in the place of messages.
    """
    if isinstance(messages, (str, Mapping)) or not all(isinstance(message, Mapping) for message in messages):
        raise DataError(
            'messages must be a list of messages, such as [{"role": "user", "content": "2+2="}]; got '
            f"a {type(messages).__name__}: {shortened(repr(messages), 100)}"
        )
    chat = Chat(Vocabulary(tokenizer), tools)
    segments = [chat.prefix(messages), Segment(chat.prompt(messages), trained=False)]
    [(ids, _)] = _render(tokenizer, [_with_images(segments, messages, images)])
    if not ids:
        raise DataError(f"the prompt {list(messages)!r} has no token; give at least one message with text")
    if images is not None:
        images.check(ids, pictures_of(messages))
    return ids


def render_completion(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[int]:
    """Return the ids of `sample.completion` and of the end of the turn, to follow those of `render_prompt`.

    Before the completion is what the chat template writes there, such as an empty thought, unless the completion has
    its own. The end is that of the chat template, if it has one, else the tokenizer's end-of-sequence token.
    """
    chat = Chat(Vocabulary(tokenizer), sample.tools)
    turn: Message = {"role": "assistant", "content": sample.completion}
    return _render(tokenizer, [chat.ending(sample.messages, chat.prompt(sample.messages), turn)])[0][0]


def render_steps(
    tokenizer: PreTrainedTokenizerBase, sample: Sample, steps: Sequence[str]
) -> tuple[list[int], list[int]]:
    """Return the ids of a row whose answer consists of `steps`, and the position of the token after each step.

    Each step is tokenised by itself, so that its end is the end of a token, and the end of the turn follows the last.
    """
    chat, vocabulary = Chat(Vocabulary(tokenizer), sample.tools), Vocabulary(tokenizer)
    turn: Message = {"role": "assistant", "content": "".join(steps)}
    end, lead = Segment("", trained=True, tokens=(vocabulary.eos,)), ""
    if tokenizer.chat_template:
        answer, end = chat.ending(sample.messages, chat.prompt(sample.messages), turn)
        lead = answer.text.removesuffix("".join(steps)) if answer.text.endswith("".join(steps)) else ""
    pieces = _render(tokenizer, [[Segment(step, trained=True)] for step in (lead + steps[0], *steps[1:])])
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
    chat = Chat(Vocabulary(tokenizer), tools)
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
    vocabulary = Vocabulary(tokenizer)

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
    return Chat(Vocabulary(tokenizer), ()).probed_end([{"role": "user", "content": "?"}])


def has_answer(sample: Sample) -> bool:
    """Whether `sample` has something to train on: plain text, or an assistant turn after a prompt."""
    return bool(sample.completion) or any(turn["role"] == "assistant" for turn in sample.messages[1:])


def _segments(vocabulary: Vocabulary, sample: Sample, train_on: TrainOn) -> list[Segment]:
    chat = Chat(vocabulary, sample.tools)
    if not sample.messages and sample.completion:
        return [chat.prefix(()), chat.text(sample.completion)]
    turns = list(sample.messages)
    if sample.completion:
        turns.append({"role": "assistant", "content": sample.completion})
    return chat.conversation(turns, train_on)


def _with_images(segments: list[Segment], messages: Sequence[Message], images: ImageInputs | None) -> list[Segment]:
    """`segments` of a conversation with its images in place of their placeholders."""
    pictures = pictures_of(messages)
    if images is None:
        if pictures:
            raise DataError("the conversation has images, which are not supported here, only in SFT and GRPO")
        return segments
    texts = images.expanded([segment.text for segment in segments], pictures)
    return [replace(segment, text=text) for segment, text in zip(segments, texts, strict=True)]


def _render(tokenizer: PreTrainedTokenizerBase, rows: Sequence[Sequence[Segment]]) -> list[Rendered]:
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
        from rlframework.datasets.conversations import lone_surrogate

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
