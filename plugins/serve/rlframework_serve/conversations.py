"""The conversations of a session, by the digests of their beginnings: a shared beginning is kept once.

A request brings its conversation as messages. The recorded turns in it are found, whose exact tokens it continues.
Clients that share a token have an engine session for each conversation, so that all engines share the load.
"""

from __future__ import annotations

import hashlib
import json
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from rlframework.interfaces.messages import Content, Message, ToolSpec

if TYPE_CHECKING:
    from torch import Tensor

V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class Turn:
    """A recorded turn. `messages`: the conversation up to and including it.

    `before`: the turn whose tokens the conversation continues; `ids`: [T] int64, the tokens after those. `length`: the
    number of all tokens.
    """

    messages: tuple[Message, ...]
    before: Turn | None
    ids: Tensor
    length: int

    def all_ids(self) -> list[int]:
        """Return the exact tokens of the conversation."""
        parts, turn = [self.ids], self.before
        while turn is not None:
            parts.append(turn.ids)
            turn = turn.before
        ids: list[int] = torch.cat(parts[::-1]).tolist()
        return ids


class Conversations:
    """The recorded conversations. A request costs time in proportion to its messages, and memory for new ones."""

    def __init__(self) -> None:
        self._by_beginning: dict[bytes, Turn | None] = {}
        """The digests of `_beginnings`, each with its turn if it ends with a sampled message."""

    def find(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Turn | None:
        """Return the longest recorded turn whose conversation `messages` begins with."""
        return _of_longest_beginning(self._by_beginning, messages, tools)

    def add(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], message: Message, before: Turn | None, ids: Tensor
    ) -> list[Message]:
        """Record the turn `message`, an answer to `messages`; return those of `messages` that are new."""
        *beginnings, whole = _beginnings([*messages, message], tools)
        new = [said for said, digest in zip(messages, beginnings, strict=True) if digest not in self._by_beginning]
        for digest in beginnings:
            self._by_beginning.setdefault(digest, None)
        length = len(ids) + (0 if before is None else before.length)
        self._by_beginning[whole] = Turn((*messages, message), before, ids, length)
        return new


def identity_of_tools(tools: Sequence[ToolSpec]) -> str:
    """Return a text that differs for different tools."""
    return json.dumps(tools, sort_keys=True)


def identity_of_message(message: Message) -> tuple[Any, ...]:
    """Return the parts of a message that distinguish it. Reasoning does not count: clients leave it out."""
    calls = tuple(
        (call["id"], call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())
    )
    return message["role"], _seen_content(message["content"]), calls, message.get("tool_call_id")


def _seen_content(content: Content) -> Any:
    """The text of a content, with digests of the images in it; how a text is divided into parts does not count."""
    if isinstance(content, str):
        return content
    found: list[str | tuple[str]] = [""]
    for part in content:
        if part["type"] == "image":
            found += [(part["image"].digest,), ""]
        else:
            found[-1] = f"{found[-1]}{part['text']}"
    return found[0] if len(found) == 1 else tuple(found)


MOST_ANSWERS = 65_536
"""The last answers whose engine session is kept. After an older one, a conversation goes on in a new session."""


class EngineSessions:
    """The engine session of each conversation, found by the messages that a request begins with.

    Keeps digests, no messages. `begin()` returns a new session.
    """

    def __init__(self, begin: Callable[[], str]) -> None:
        self._begin = begin
        self._by_beginning: OrderedDict[bytes, str] = OrderedDict()

    def of(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> str:
        """Return the session of the longest beginning of `messages` that ends with an answer, or a new one."""
        return _of_longest_beginning(self._by_beginning, messages, tools) or self._begin()

    def answered(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], answer: Message, engine_session: str
    ) -> None:
        """Note that `engine_session` has answered `messages` with `answer`."""
        *_, digest = _beginnings([*messages, answer], tools)
        self._by_beginning[digest] = engine_session
        self._by_beginning.move_to_end(digest)
        if len(self._by_beginning) > MOST_ANSWERS:
            self._by_beginning.popitem(last=False)


def _beginnings(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Iterator[bytes]:
    """The digest of each beginning of `messages`, from one message to all."""
    digest = identity_of_tools(tools).encode()
    for message in messages:
        seen = repr(identity_of_message(message)).encode("utf-8", "backslashreplace")
        digest = hashlib.blake2b(digest + seen, digest_size=16).digest()
        yield digest


def _of_longest_beginning(
    values: Mapping[bytes, V | None], messages: Sequence[Message], tools: Sequence[ToolSpec]
) -> V | None:
    """The value of the longest beginning of `messages` that has one."""
    found = (values.get(digest) for digest in reversed(list(_beginnings(messages, tools))))
    return next((value for value in found if value is not None), None)
