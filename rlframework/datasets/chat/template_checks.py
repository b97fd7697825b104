"""Checks of a chat template: it writes the texts of messages, and assistant turns begin and end as in training rows."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlframework.base.errors import DataError
from rlframework.datasets.chat.chat_template import apply_template
from rlframework.datasets.chat.rendering import end_of_turn
from rlframework.interfaces.messages import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)

_SYSTEM: tuple[Message, ...] = ({"role": "system", "content": "!"},)


def warn_of_template(tokenizer: PreTrainedTokenizerBase, *, rows: bool) -> None:
    """Log what is wrong with the chat template, for `rows` that have answers or for prompts."""
    for problem in (start_of_turn_problem(tokenizer), end_of_turn_problem(tokenizer, rows=rows)):
        if problem is not None:
            _LOG.warning("%s", problem)


def require_contents(tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise a `DataError` if the chat template writes the same for any text of a user message.

    A template that rejects the probed conversations is not judged: the first row shows whether it takes those.
    """
    if not tokenizer.chat_template:
        return
    found = [_writes_text(tokenizer, before) for before in ((), _SYSTEM)]
    if True in found or False not in found:
        return
    raise DataError(
        "the chat template does not write the text of a user message: the prompt is the same whatever the text is. It "
        "probably reads a wrong field: each of `messages` has `role` and `content`, the text. Correct the template, or "
        "set policy.chat_template to another one"
    )


def end_of_turn_problem(tokenizer: PreTrainedTokenizerBase, *, rows: bool = True) -> str | None:
    """Return why no token ends the assistant turns of the chat template, and what to do; None if one does.

    `rows`: rows with answers are rendered; otherwise the model samples the answers.
    """
    try:
        if not tokenizer.chat_template or end_of_turn(tokenizer):
            return None
    except DataError:  # raised for the first row
        return None
    if not rows:
        return (
            f"the chat template ends an assistant turn with no special token, so only {tokenizer.eos_token!r} ends an "
            "answer: a model that has learned another end keeps writing until generation.max_new_tokens. Set "
            "policy.chat_template to one that ends turns as the model does"
        )
    return (
        f"the chat template ends an assistant turn with no special token, so rows end with {tokenizer.eos_token!r} "
        "instead, which the template does not write, and earlier turns with nothing: the model would not learn to end "
        f"them. Set policy.chat_template to one that ends turns with {tokenizer.eos_token!r} (in the template, "
        "eos_token), or add the template's end of turn to the tokenizer as one special token "
        "(tokenizer.add_special_tokens, then resize the model's embeddings)"
    )


def start_of_turn_problem(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """Return why prompts lack the beginning of an assistant turn, and what to do; None if they have it.

    Templates whose answers follow the prompt at once, as Llama 2's, need no `add_generation_prompt`. A template that
    uses it may write more before an answer, such as an empty thought, so it is not checked.
    """
    if not tokenizer.chat_template:
        return None
    question: Message = {"role": "user", "content": "?"}
    answer: Message = {"role": "assistant", "content": "!"}
    try:
        prompt = apply_template(tokenizer, [question], prompt=True)
        if prompt != apply_template(tokenizer, [question]):
            return None
        whole = apply_template(tokenizer, [question, answer])
    except DataError:  # raised for the first row
        return None
    header = whole.removeprefix(prompt).partition("!")[0]
    if not whole.startswith(prompt) or not header.strip():
        return None
    return (
        f"the chat template writes {header!r} before an answer, but not at the end of a prompt: it ignores "
        f"`add_generation_prompt`, so the model would begin its answers without it. End the template with "
        f"{{% if add_generation_prompt %}}{{{{ {header!r} }}}}{{% endif %}}"
    )


def _writes_text(tokenizer: PreTrainedTokenizerBase, before: Sequence[Message]) -> bool | None:
    """Whether the prompt depends on the text of a user message that follows `before`; None if it is rejected."""
    conversations: list[list[Message]] = [[*before, {"role": "user", "content": text}] for text in ("apple", "pear")]
    try:
        first, second = (apply_template(tokenizer, each, prompt=True) for each in conversations)
    except DataError:
        return None
    return first != second
