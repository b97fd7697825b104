"""Checks that a chat template begins and ends an assistant turn in the same way in prompts and in training rows."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from rlframework.datasets.chat_template import apply_template
from rlframework.datasets.rendering import end_of_turn
from rlframework.errors import DataError
from rlframework.interfaces.messages import Message

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_LOG = logging.getLogger(__name__)


def warn_of_template(tokenizer: PreTrainedTokenizerBase, *, rows: bool) -> None:
    """Log what is wrong with the chat template, for `rows` that have answers or for prompts."""
    for problem in (start_of_turn_problem(tokenizer), end_of_turn_problem(tokenizer, rows=rows)):
        if problem is not None:
            _LOG.warning("%s", problem)


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
