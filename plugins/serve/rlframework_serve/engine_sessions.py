"""Engine sessions of clients that share a token: one for each conversation, so that all engines share the load."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

from rlframework.interfaces.messages import Message, ToolSpec
from rlframework_serve.conversations import identity_of_message, identity_of_tools

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
        sessions = (self._by_beginning.get(digest) for digest in reversed(list(_beginnings(messages, tools))))
        return next((session for session in sessions if session is not None), None) or self._begin()

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
