"""Sessions of the endpoint: one for each rollout of an agent, found by its bearer token."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import secrets
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rlframework.interfaces.environment import LARGEST_REWARD
from rlframework.interfaces.messages import Message, ToolSpec, text_of
from rlframework.rollout.endpoint.errors import ApiError, unauthorized
from rlframework.rollout.trajectory import Trajectory

R = TypeVar("R")

_MOST_METRICS = 100


@dataclass(frozen=True, eq=False)
class Turn:
    """A recorded turn: the conversation up to and including it, and the exact tokens of that conversation."""

    messages: tuple[Message, ...]
    ids: tuple[int, ...]


@dataclass(eq=False)
class Session:
    """What an agent has sampled. `engine_session`: the id for the generation client.

    `seed`: None if clients choose seeds. `record`: whether turns are kept, for training. `reward` and `metrics` are
    those that the agent has posted. `truncated`: whether a limit has ended a turn or refused one.
    """

    engine_session: str
    seed: int | None = None
    record: bool = True
    max_turns: int | None = None
    id: str = field(default_factory=lambda: secrets.token_hex(8))
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    trajectory: Trajectory = field(default_factory=Trajectory)
    transcript: list[dict[str, Any]] = field(default_factory=list)
    reward: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    started: int = 0
    calls: int = 0
    malformed: int = 0
    truncated: bool = False
    completion: str = ""
    closed: bool = False
    responses: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    _turns: dict[str, Turn] = field(default_factory=dict)
    _shown: set[str] = field(default_factory=set)
    _running: set[asyncio.Task[Any]] = field(default_factory=set)

    def begin_turns(self, count: int) -> int:
        """Count `count` new turns; return the number of the first. `ApiError` if that exceeds `max_turns`."""
        if self.max_turns is not None and self.started + count > self.max_turns:
            self.truncated = True
            raise ApiError(
                f"this session has had {self.started} turns, and {count} more exceed environment.max_turns="
                f"{self.max_turns}",
                code="max_turns",
            )
        first, self.started = self.started, self.started + count
        return first

    def find(self, messages: Sequence[Message], tools: Sequence[ToolSpec]) -> Turn | None:
        """Return the longest recorded turn whose conversation `messages` begins with."""
        keys = _keys(messages, tools)
        return next((self._turns[key] for key in reversed(keys) if key in self._turns), None)

    def add_turn(
        self, messages: Sequence[Message], tools: Sequence[ToolSpec], message: Message, ids: list[int]
    ) -> None:
        """Record `message`, the model's answer to `messages`; `ids` are the exact tokens of both."""
        conversation = (*messages, message)
        keys = _keys(conversation, tools)
        for said, key in zip(messages, keys, strict=False):
            if key not in self._shown:
                self.transcript.append({**said, "trained": False})
        self._shown.update(keys)
        self.transcript.append({**message, "trained": True})
        self._turns[keys[-1]] = Turn(conversation, tuple(ids))
        self.completion = text_of(message)

    def set_reward(self, body: Any) -> None:
        """Take the reward that the agent posts: `{"reward": 1.0, "metrics": {"name": 0.5}}`. The last one counts."""
        metrics = body.get("metrics") or {} if isinstance(body, Mapping) else None
        if not isinstance(metrics, Mapping) or len(metrics) > _MOST_METRICS:
            raise ApiError('a reward is posted as {"reward": NUMBER, "metrics": {"name": NUMBER}}')
        values = {"reward": body.get("reward"), **{f"metrics.{name}": value for name, value in metrics.items()}}
        for name, value in values.items():
            fits = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not fits or abs(value) > LARGEST_REWARD:
                raise ApiError(
                    f"{name[:80]}={value!r:.80} must be a finite number of at most {LARGEST_REWARD:g} in size"
                )
        self.reward = float(body["reward"])
        self.metrics = {str(name): float(value) for name, value in metrics.items()}

    async def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Return the result of `work`, which is cancelled when the session is closed: then `ApiError` 401."""
        task = asyncio.ensure_future(work)
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self.closed:
                raise unauthorized() from None
            raise
        finally:
            task.cancel()
            self._running.discard(task)

    def close(self) -> None:
        """Cancel the requests in progress; later ones are rejected."""
        self.closed = True
        for task in self._running:
            task.cancel()


class Sessions:
    """The open sessions."""

    def __init__(self) -> None:
        self._by_token: dict[bytes, Session] = {}

    def open(self, session: Session) -> Session:
        """Accept requests of `session` from now on."""
        self._by_token[_digest(session.token)] = session
        return session

    def close(self, session: Session) -> None:
        """Accept no more requests of `session`, and cancel those in progress."""
        self._by_token.pop(_digest(session.token), None)
        session.close()

    def find(self, authorization: str | None) -> Session:
        """Return the session of the header `Authorization: Bearer TOKEN`. `ApiError` 401 if there is none."""
        kind, _, token = (authorization or "").partition(" ")
        session = self._by_token.get(_digest(token.strip())) if kind.lower() == "bearer" else None
        if session is None:
            raise unauthorized()
        return session


def _digest(token: str) -> bytes:
    """The key of a token: comparing digests takes the same time for all wrong tokens."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()


def _keys(messages: Sequence[Message], tools: Sequence[ToolSpec]) -> list[str]:
    """Return a key for each beginning of a conversation. Reasoning does not count: clients leave it out."""
    found: list[str] = []
    state = hashlib.blake2b(json.dumps(tools, sort_keys=True).encode(), digest_size=16)
    for message in messages:
        calls = [
            (call["id"], call["function"]["name"], call["function"]["arguments"])
            for call in message.get("tool_calls", ())
        ]
        seen = [message["role"], text_of(message), calls, message.get("tool_call_id")]
        state.update(json.dumps(seen).encode())
        found.append(state.hexdigest())
    return found
