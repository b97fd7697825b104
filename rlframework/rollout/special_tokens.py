"""Answers as the model wrote them, with the special tokens that their text leaves out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def with_special_tokens(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], *, ended: bool) -> str:
    """Return the text of an answer's tokens `ids` with special ones, if the text without them hides something.

    That is so for special tokens before the one that ended the answer, if it has `ended`, and for an answer that
    consists of special tokens only, such as of its end. Otherwise the result is empty.
    """
    special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    inside = ids[:-1] if ended else ids
    if special.isdisjoint(inside) and not (ids and special.issuperset(ids)):
        return ""
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))
