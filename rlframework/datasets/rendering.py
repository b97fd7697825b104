"""Conversations as token ids: the prompt that a model continues, and what supervised training teaches, with its mask.

Prompt and completion are tokenised apart and joined, so that the prompt's ids are always a prefix of the whole: what
training sees is what generation saw. So the mask is right by construction; how turns become pieces of text is in
`turns`. A chat template that writes earlier turns anew (that drops their reasoning, say) has no one row in which every
assistant turn follows what generation saw: training on all of them is refused then, training on the last is not.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from rlframework.datasets.chat_templates import Chat, Piece
from rlframework.datasets.text_values import lone_surrogate
from rlframework.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.config.algorithms import TrainOn
    from rlframework.interfaces.environment import Message, Sample

Rendered = tuple[list[int], list[bool]]
"""Token ids, and which of them are trained on."""


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """The ids that the model continues with the next assistant turn.

    With a chat template: the template's, with its generation prompt. Without: the contents one after the other, and the
    begin token before them where the tokenizer is set up to add it. Nothing at all is a `DataError`.
    """
    chat = Chat(tokenizer)
    ids = [*chat.prefix(messages), *_encode(tokenizer, [chat.prompt(messages)])[0]]
    if not ids:
        raise DataError(f"the prompt {list(messages)!r} has no token; give at least one message with text")
    return ids


def render_completion(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[int]:
    """The ids of `sample.completion` and the token that ends the turn, as they follow `render_prompt`'s.

    The end is the chat template's end of turn where it has one, else the tokenizer's end token.
    """
    return _render(tokenizer, [([], Chat(tokenizer).completion(sample.messages, sample.completion))])[0][0]


def render_conversation(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], train_on: TrainOn = "last"
) -> Rendered:
    """A whole conversation, up to its last assistant turn and the token that ends it, as ids and mask.

    `train_on`: the tokens with a true mask are those of the `last` assistant turn, of every `assistant` turn, or `all`.
    The end of a turn belongs to it. The ids before the last turn's are `render_prompt`'s with `last` and `all`. With
    `assistant` they are the same text, and the same ids unless the tokenizer joins letters over the border of a turn.

    A conversation that begins with the assistant is not trained on there: nothing leads to it. No assistant turn, and
    `assistant` with a template that writes earlier turns anew, is a `DataError`.
    """
    chat = Chat(tokenizer)
    return _render(tokenizer, [(chat.prefix(messages), chat.conversation(messages, train_on))])[0]


def render_samples(
    tokenizer: PreTrainedTokenizerBase,
    samples: Sequence[Sample],
    train_on: TrainOn = "last",
    max_tokens: int | None = None,
) -> list[Rendered]:
    """`render_conversation` of each sample's messages and completion, tokenised together, which is faster.

    A sample without messages is plain text: its completion and the end token, all of it trained on. Rows of more than
    `max_tokens` are cut at their end. Errors begin with the sample's id.
    """
    chat = Chat(tokenizer)
    try:
        rows = _render(tokenizer, [_parts(chat, sample, train_on) for sample in samples])
        return [(ids[:max_tokens], mask[:max_tokens]) for ids, mask in rows]
    except DataError as error:
        for sample in samples:  # which of them was it
            try:
                _render(tokenizer, [_parts(chat, sample, train_on)])
            except DataError as cause:
                raise DataError(f"sample {sample.id!r}: {cause}") from error
        raise


def has_answer(sample: Sample) -> bool:
    """Whether there is something to learn from it: plain text, or what the assistant says after a prompt."""
    return bool(sample.completion) or any(turn["role"] == "assistant" for turn in sample.messages[1:])


def _parts(chat: Chat, sample: Sample, train_on: TrainOn) -> tuple[list[int], list[Piece]]:
    if not sample.messages and sample.completion:
        return chat.prefix(()), chat.text(sample.completion)
    turns = list(sample.messages)
    if sample.completion:
        turns.append({"role": "assistant", "content": sample.completion})
    return chat.prefix(turns), chat.conversation(turns, train_on)


def _render(tokenizer: PreTrainedTokenizerBase, rows: Sequence[tuple[list[int], list[Piece]]]) -> list[Rendered]:
    """Ids and mask of each row: the ids before it, which are not trained on, and its pieces."""
    spaced = any(piece.inside and piece.text[:1] == " " for _, pieces in rows for piece in pieces)
    if spaced and _puts_space(tokenizer):
        rows = [(prefix, [_without_space(piece) for piece in pieces]) for prefix, pieces in rows]
    texts = [text for _, pieces in rows for piece in pieces for text in (piece.text, piece.end) if text]
    encoded = iter(_encode(tokenizer, texts))
    return [_join(tokenizer, prefix, pieces, encoded) for prefix, pieces in rows]


def _puts_space(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether it puts a space before each text, as SentencePiece does."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return False
    text = backend.normalizer.normalize_str("x") if backend.normalizer else "x"
    pieces = backend.pre_tokenizer.pre_tokenize_str(text) if backend.pre_tokenizer else [(text, (0, 1))]
    return bool(pieces and pieces[0][0] in ("▁x", "Ġx", "▁", "Ġ", " x"))


def _without_space(piece: Piece) -> Piece:
    """`piece` without the first space, which the tokenizer then puts there."""
    spaced = piece.inside and piece.text[:1] == " " and len(piece.text) > 1
    return replace(piece, text=piece.text[1:]) if spaced else piece


def _join(
    tokenizer: PreTrainedTokenizerBase, prefix: list[int], pieces: Sequence[Piece], encoded: Iterator[list[int]]
) -> Rendered:
    ids, mask = list(prefix), [False] * len(prefix)
    for piece in pieces:
        tokens = next(encoded) if piece.text else []
        end = next(encoded) if piece.end else []
        if tokens[: len(end)] != end:  # the tokenizer joins letters over the border: apart, then
            tokens = end + _encode(tokenizer, [piece.text[len(piece.end) :]])[0]
        ids += [*tokens, *piece.tokens]
        mask += [True] * len(end) + [piece.trained] * (len(tokens) - len(end) + len(piece.tokens))
    return ids, mask


def _encode(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> list[list[int]]:
    """The ids of each text, without special tokens around them."""
    if not texts:
        return []
    try:
        return [list(ids) for ids in tokenizer(texts, add_special_tokens=False)["input_ids"]]
    except Exception as error:  # the tokenizers library raises bare Exception, and TypeError for half a character
        for text in texts:
            if (half := lone_surrogate(text)) is not None:
                raise DataError(f"half a character ({half}) in {text!r}: no tokenizer takes it") from error
        if "Missing [UNK] token" not in str(error):
            raise
        raise _no_token(tokenizer, texts) from error


def _no_token(tokenizer: PreTrainedTokenizerBase, texts: list[str]) -> DataError:
    """What to say of the first of `texts` that the tokenizer has no tokens for."""
    vocabulary = tokenizer.get_vocab()
    words = [word for word in vocabulary if len(word) > 1]
    for text in texts:
        rest = text
        for word in sorted(words, key=len, reverse=True):
            rest = rest.replace(word, "")
        unknown = sorted({letter for letter in rest if letter not in vocabulary})
        if unknown:
            return DataError(f"the tokenizer has no token for {unknown} in {text!r}; add them to its alphabet")
    return DataError(f"the tokenizer has no tokens for some letters of {texts[0]!r}; add them to its alphabet")
