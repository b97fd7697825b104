"""Find the text that a chat template puts between the model's turn and its next one, and whether history stays.

The conversation is rendered twice, with and without the new messages. The exact tokens of the history may be extended
only if the template still writes the earlier prompt and the model's turn; where it rewrites them, nothing is returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rlframework.datasets.chat.chat_text import ChatText
from rlframework.interfaces.messages import Message, ToolSpec, text_of

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
