"""Conversations as token ids: the prompt that a model continues, and the completion that supervised training teaches.

Prompt and completion are tokenised apart and joined, so that the prompt's ids are always a prefix of the whole: what
training sees is what generation saw.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rlframework.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlframework.interfaces.environment import Message, Sample


def render_prompt(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message]) -> list[int]:
    """The ids that the model continues with the next assistant turn.

    With a chat template: the template's, with its generation prompt. Without: the contents one after the other, and the
    begin token before them where the tokenizer is set up to add it. Nothing at all is a `DataError`.
    """
    if tokenizer.chat_template:
        ids = _encode(tokenizer, _template(tokenizer, messages, add_generation_prompt=True))
    else:
        ids = _prefix(tokenizer) + _encode(tokenizer, "".join(message["content"] for message in messages))
    if not ids:
        raise DataError(f"the prompt {list(messages)!r} has no token; give at least one message with text")
    return ids


def render_completion(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[int]:
    """The ids of `sample.completion` and the token that ends the turn, as they follow `render_prompt`'s.

    The end is the chat template's end of turn where it has one, else the tokenizer's end token.
    """
    return _encode(tokenizer, sample.completion) + _end_of_turn(tokenizer, sample)


def _encode(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    try:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])
    except Exception as error:  # the tokenizers library raises bare Exception
        if "Missing [UNK] token" not in str(error):
            raise
        unknown = sorted({c for c in text if c not in tokenizer.get_vocab()})
        raise DataError(f"the tokenizer has no token for {unknown} in {text!r}; add them to its alphabet") from error


def _prefix(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    ids = list(tokenizer("")["input_ids"])
    return ids[:1] if ids and ids[0] == tokenizer.bos_token_id else []


def _template(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], **options: Any) -> str:
    from jinja2 import TemplateError

    plain = [{"role": message["role"], "content": message["content"]} for message in messages]
    try:
        return str(tokenizer.apply_chat_template(plain, tokenize=False, **options))
    except TemplateError as error:
        roles = [message["role"] for message in messages]
        raise DataError(
            f"the model's chat template refuses a conversation with the roles {roles}: {error}. Some have no "
            "system role: then leave environment.system_prompt out"
        ) from error


def _end_of_turn(tokenizer: PreTrainedTokenizerBase, sample: Sample) -> list[int]:
    if tokenizer.eos_token_id is None:
        raise DataError("the tokenizer has no end token (eos_token), so completions cannot be ended")
    fallback = [int(tokenizer.eos_token_id)]
    if not tokenizer.chat_template:
        return fallback
    answer: Message = {"role": "assistant", "content": sample.completion}
    before = _template(tokenizer, sample.messages, add_generation_prompt=True)
    whole = _template(tokenizer, [*sample.messages, answer])
    text = sample.completion if whole.startswith(before + sample.completion) else sample.completion.strip()
    if not whole.startswith(before + text):
        return fallback
    special = set(tokenizer.all_special_ids)
    tail = _encode(tokenizer, whole[len(before + text) :])
    ends = [position for position, token in enumerate(tail) if token in special]
    return tail[: ends[0] + 1] if ends else fallback
