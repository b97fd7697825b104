"""Render conversations to token ids: prompts for generation, and training rows with a mask.

Prompt and completion are tokenised separately and joined, so the prompt's ids are always a prefix of the row: training
sees what generation saw, and the mask is right by construction. `chat_templates` splits turns into text segments. If a
chat template rewrites earlier turns (by dropping their reasoning, say), no single row has every assistant turn after
what generation saw: training on all of them is then rejected, training on the last is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlframework.config.algorithms import TrainOn
from rlframework.datasets.chat_templates import Chat, Segment
from rlframework.datasets.conversations import lone_surrogate
from rlframework.errors import DataError
from rlframework.interfaces.environment import Message, Sample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Rendered = tuple[list[int], list[bool]]
"""Token ids, and for each whether it is trained on."""


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """Return the ids that the model continues with the next assistant turn.

    With a chat template, they include its generation prompt. Without one, the contents are concatenated after the
    beginning-of-sequence token, if the tokenizer adds one. Raises a `DataError` for an empty prompt.
    """
    chat = Chat(tokenizer)
    ids = [*chat.prefix(messages), *_encode(tokenizer, [chat.prompt(messages)])[0]]
    if not ids:
        raise DataError(f"the prompt {list(messages)!r} has no token; give at least one message with text")
    return ids


def render_completion(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[int]:
    """Return the ids of `sample.completion` and of the end of the turn, to follow those of `render_prompt`.

    The end is that of the chat template, if it has one, else the tokenizer's end-of-sequence token.
    """
    return _render(tokenizer, [([], Chat(tokenizer).completion(sample.messages, sample.completion))])[0][0]


def render_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], train_on: TrainOn = "last"
) -> Rendered:
    """Render a conversation, up to and including the end of its last assistant turn, as ids and mask.

    `train_on`: the mask is true on the `last` assistant turn, on every `assistant` turn, or on `all` tokens. The end of
    a turn belongs to it. With `last` and `all`, the ids before the last turn are those of `render_prompt`. With
    `assistant` they have the same text, and the same ids unless the tokenizer merges characters across turns.

    An assistant turn at the start is not trained on, since no prompt precedes it. Raises a `DataError` if there is no
    other assistant turn, and for `assistant` with a template that rewrites earlier turns.
    """
    chat = Chat(tokenizer)
    return _render(tokenizer, [(chat.prefix(messages), chat.conversation(messages, train_on))])[0]


def render_samples(
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
    train_on: TrainOn = "last",
    max_tokens: int | None = None,
) -> list[Rendered]:
    """Apply `render_conversation` to each sample's messages and completion, tokenising them together for speed.

    A sample without messages is plain text: its completion and the end-of-sequence token, all trained on. Rows longer
    than `max_tokens` are truncated at the end. Errors begin with the sample's id.
    """
    chat = Chat(tokenizer)
    try:
        rows = _render(tokenizer, [_segments(chat, sample, train_on) for sample in samples])
        return [(ids[:max_tokens], mask[:max_tokens]) for ids, mask in rows]
    except DataError as error:
        for sample in samples:  # find the sample to blame
            try:
                _render(tokenizer, [_segments(chat, sample, train_on)])
            except DataError as cause:
                raise DataError(f"sample {sample.id!r}: {cause}") from error
        raise


def has_answer(sample: Sample) -> bool:
    """Whether `sample` has something to train on: plain text, or an assistant turn after a prompt."""
    return bool(sample.completion) or any(turn["role"] == "assistant" for turn in sample.messages[1:])


def _segments(chat: Chat, sample: Sample, train_on: TrainOn) -> tuple[list[int], list[Segment]]:
    if not sample.messages and sample.completion:
        return chat.prefix(()), chat.text(sample.completion)
    turns = list(sample.messages)
    if sample.completion:
        turns.append({"role": "assistant", "content": sample.completion})
    return chat.prefix(turns), chat.conversation(turns, train_on)


def _render(tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[list[int], list[Segment]]]) -> list[Rendered]:
    """Ids and mask of each row, given as its prefix of ids, not trained on, and its segments."""
    spaced = any(segment.inside and segment.text[:1] == " " for _, segments in rows for segment in segments)
    if spaced and _puts_space(tokenizer):
        rows = [(prefix, [_without_space(segment) for segment in segments]) for prefix, segments in rows]
    texts = [text for _, segments in rows for segment in segments for text in (segment.text, segment.end) if text]
    encoded = iter(_encode(tokenizer, texts))
    return [_join(tokenizer, prefix, segments, encoded) for prefix, segments in rows]


def _puts_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer prepends a space to each text, as SentencePiece does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    text = backend.normalizer.normalize_str("x") if backend.normalizer else "x"
    words = backend.pre_tokenizer.pre_tokenize_str(text) if backend.pre_tokenizer else [(text, (0, 1))]
    return bool(words and words[0][0] in ("▁x", "Ġx", "▁", "Ġ", " x"))


def _without_space(segment: Segment) -> Segment:
    """`segment` without its first space, which the tokenizer adds again."""
    spaced = segment.inside and segment.text[:1] == " " and len(segment.text) > 1
    return replace(segment, text=segment.text[1:]) if spaced else segment


def _join(
    tokenizer: PreTrainedTokenizerBase, prefix: list[int], segments: Sequence[Segment], encoded: Iterator[list[int]]
) -> Rendered:
    ids, mask = list(prefix), [False] * len(prefix)
    for segment in segments:
        tokens = next(encoded) if segment.text else []
        end = next(encoded) if segment.end else []
        if tokens[: len(end)] != end:  # characters merge across the boundary: tokenise separately
            tokens = end + _encode(tokenizer, [segment.text[len(segment.end) :]])[0]
        ids += [*tokens, *segment.tokens]
        mask += [True] * len(end) + [segment.trained] * (len(tokens) - len(end) + len(segment.tokens))
    return ids, mask


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """The ids of each text, without added special tokens."""
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
        unknown = sorted(character for character in set("".join(texts)) if not _has_token(tokenizer, character))
        text = next((text for text in texts if set(text) & set(unknown)), texts[0])
        raise DataError(f"the tokenizer has no token for {unknown} in {text!r}; add them to its alphabet") from error


def _has_token(tokenizer: PreTrainedTokenizerBase, character: str) -> bool:
    try:
        tokenizer(character, add_special_tokens=False)
    except Exception:  # noqa: BLE001 - as in `_encode`
        return False
    return True
