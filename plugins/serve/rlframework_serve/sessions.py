"""Sessions of the endpoint: one for each rollout of an agent, found by its bearer token."""

from __future__ import annotations

import asyncio
import hashlib
import re
import secrets
import time
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from rlframework.base.errors import EngineFault, RefitError
from rlframework.interfaces.environment import LARGEST_REWARD
from rlframework.interfaces.messages import Message, Picture, text_of
from rlframework.observers.timeline import ENVIRONMENT, Timeline
from rlframework.rollout.result import Limit
from rlframework.rollout.seeds import turn_seed
from rlframework.rollout.trajectory import Trajectory
from rlframework_serve.bodies import ApiError, unauthorized
from rlframework_serve.conversations import Conversations, EngineSessions, Turn
from rlframework_serve.request_bodies import TurnRequest

if TYPE_CHECKING:
    from torch import Tensor

R = TypeVar("R")

MOST_GIVEN_UP = 65_536
"""Sessions that were given up whose clients are told so; others get an answer as for an unknown token."""
MOST_RESPONSES = 256
"""The responses of a session that `previous_response_id` may name: the last ones."""

_MOST_METRICS = 100
_METRIC = re.compile(r"[A-Za-z0-9_. /-]{1,100}")
"""The name of a posted metric: what all services that record metrics accept."""


@dataclass(eq=False)
class Session:
    """The turns that an agent has sampled. `engine_session`: the id for the generation client.

    `engine_sessions`: has such an id for each conversation instead, for clients that share the token.
    `seed`: None if clients choose seeds. `record`: whether turns are kept, for training. `reward` and `metrics` are
    those that the agent has posted. `limit`: what has last cut a turn or refused one. `refusal`: why a budget
    refused the last turn that was asked for; empty if it was sampled. `pictures`: the images of recorded
    requests by their digests, each stored once. `timeline`: gets the times of the agent's own code. `engine_error`:
    what an engine has failed with, which is no failure of the agent.
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
    limit: Limit | None = None
    refusal: str = ""
    completion: str = ""
    closed: ApiError | None = None
    engine_error: EngineFault | RefitError | None = None
    pictures: dict[str, Picture] = field(default_factory=dict)
    timeline: Timeline | None = None
    engine_sessions: EngineSessions | None = None
    conversations: Conversations = field(default_factory=Conversations)
    _own_since: float | None = None
    _responses: dict[str, tuple[Message, ...]] = field(default_factory=dict)
    _asked: dict[bytes, int] = field(default_factory=dict)
    _running: set[asyncio.Task[Any]] = field(default_factory=set)

    def begin_turns(self, count: int) -> None:
        """Count `count` new turns. `ApiError` if that exceeds `max_turns`."""
        if self.max_turns is not None and self.started + count > self.max_turns:
            raise self.refused(
                f"this session has had {self.started} turns, and this request for {count} exceeds "
                f"environment.max_turns={self.max_turns}",
                code="max_turns",
                limit="max_turns",
            )
        self.started += count
        self.refusal = ""

    def refused(self, message: str, *, code: str, limit: Limit) -> ApiError:
        """Return the error of a turn that a budget refuses, which makes the session truncated."""
        self.limit, self.refusal = limit, message
        return ApiError(message, code=code)

    def seeds(self, prompt: Tensor, count: int, pictures: Sequence[Picture] = ()) -> list[int] | None:
        """Return the seeds of `count` turns after the tokens `prompt`, or None if clients choose seeds.

        They depend on the session's seed, on the prompt and its `pictures`, and on how often the session has asked for
        it before, so that requests with different prompts may come in any order.
        """
        if self.seed is None:
            return None
        seen = prompt.numpy().tobytes() + "".join(picture.digest for picture in pictures).encode()
        digest = hashlib.blake2b(seen, digest_size=8).digest()
        first = self._asked.get(digest, 0)
        self._asked[digest] = first + count
        of_prompt = turn_seed(self.seed, int.from_bytes(digest, "little"))
        return [turn_seed(of_prompt, number) for number in range(first, first + count)]

    def engine_session_of(self, request: TurnRequest) -> str:
        """Return the id of the conversation of `request` for the generation client."""
        shared = self.engine_sessions
        return self.engine_session if shared is None else shared.of(request.messages, request.tools)

    def add_turn(self, request: TurnRequest, message: Message, before: Turn | None, ids: Tensor, row: int = 0) -> None:
        """Record `message`, the model's answer to a request; `ids` are the exact tokens after those of `before`.

        `row`: the training row that has the answer, counted from 0.
        """
        new = self.conversations.add(request.messages, request.tools, message, before, ids)
        self.transcript += ({**said, "trained": False} for said in new)
        self.transcript.append({**message, "trained": True, **({"row": row + 1} if row else {})})
        self.completion = text_of(message)

    def add_completion(self, prompt: str, completion: str, row: int = 0) -> None:
        """Record a completion of a text, which belongs to no conversation. `row`: see `add_turn`."""
        self.transcript.append({"role": "user", "content": prompt, "trained": False})
        message = {"role": "assistant", "content": completion}
        self.transcript.append({**message, "trained": True, **({"row": row + 1} if row else {})})
        self.completion = completion

    def keep_response(self, name: str, messages: tuple[Message, ...]) -> None:
        """Keep the conversation that ends with the response `name`, and forget the oldest beyond `MOST_RESPONSES`."""
        self._responses[name] = messages
        if len(self._responses) > MOST_RESPONSES:
            del self._responses[next(iter(self._responses))]

    def response(self, name: Any) -> tuple[Message, ...]:
        """Return the conversation that ends with the response `name`. `ApiError` if it is not kept."""
        if not isinstance(name, str) or name not in self._responses:
            kept = f"the last {MOST_RESPONSES} of a session are kept" if self.record else "none are kept here"
            raise ApiError(
                f"previous_response_id={name!r:.80} is not a response of this session; {kept}", code="not_found"
            )
        return self._responses[name]

    def set_reward(self, body: Any) -> None:
        """Take the reward that the agent posts: `{"reward": 1.0, "metrics": {"name": 0.5}}`. The last one counts.

        `ApiError` if the session was closed while the body was read.
        """
        if self.closed:
            raise self.closed
        metrics = body.get("metrics") or {} if isinstance(body, Mapping) and "reward" in body else None
        if not isinstance(metrics, Mapping) or len(metrics) > _MOST_METRICS or body.keys() - {"reward", "metrics"}:
            raise ApiError('a reward is posted as {"reward": NUMBER, "metrics": {"name": NUMBER}}')
        values = {"reward": body.get("reward"), **{f"metrics.{name}": value for name, value in metrics.items()}}
        if wrong := [name for name in metrics if not _METRIC.fullmatch(name)]:
            raise ApiError(
                f"a metric has the name {wrong[0]!r:.80}; it must have 1 to 100 of the characters A-Z, a-z, 0-9, "
                "'_', '-', '.', '/' and the space"
            )
        for name, value in values.items():
            fits = isinstance(value, int | float) and not isinstance(value, bool)
            if not fits or not abs(value) <= LARGEST_REWARD:
                raise ApiError(
                    f"{name[:80]}={value!r:.80} must be a finite number of at most {LARGEST_REWARD:g} in size"
                )
        self.reward = float(body["reward"])
        self.metrics = {name: float(value) for name, value in metrics.items()}

    async def run(self, work: Coroutine[Any, Any, R]) -> R:
        """Return the result of `work`, which is cancelled when the session is closed: then the `ApiError` of `close`.

        It does not begin if the session was closed while the request was read.
        """
        if self.closed:
            work.close()
            raise self.closed
        task = asyncio.ensure_future(work)
        self.end_own_time()
        self._running.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            if self.closed:
                raise self.closed from None
            raise
        except (EngineFault, RefitError) as error:
            if not self.record:
                raise
            self.engine_error = self.engine_error or error  # it ends the run, whose endpoint has nothing to log
            raise _given_up() from error
        finally:
            task.cancel()
            self._running.discard(task)
            if not self._running:
                self.begin_own_time()

    def begin_own_time(self) -> None:
        """Note that the agent's own code runs from now on: no request of it is being answered."""
        self._own_since = time.perf_counter()

    def end_own_time(self) -> None:
        """Add the time since `begin_own_time` to the timeline, unless that has been done."""
        begun, self._own_since = self._own_since, None
        if begun is not None and self.timeline is not None:
            self.timeline.add(ENVIRONMENT, "agent", begun, time.perf_counter())

    def close(self, error: ApiError) -> None:
        """Cancel the requests in progress; they and later ones are rejected with `error`."""
        self.closed = self.closed or error
        for task in self._running:
            task.cancel()


class Sessions:
    """The open sessions."""

    def __init__(self) -> None:
        self._by_token: dict[bytes, Session] = {}
        self._given_up: dict[bytes, None] = {}
        """The newest `MOST_GIVEN_UP`."""

    def open(self, session: Session) -> Session:
        """Accept requests of `session` from now on."""
        self._by_token[_digest(session.token)] = session
        return session

    def close(self, session: Session, *, given_up: bool = False) -> None:
        """Accept no more requests of `session`, and cancel those in progress. `given_up`: clients are told so."""
        self._by_token.pop(_digest(session.token), None)
        if given_up:
            self._given_up[_digest(session.token)] = None
            if len(self._given_up) > MOST_GIVEN_UP:
                del self._given_up[next(iter(self._given_up))]
        session.close(_given_up() if given_up else unauthorized())

    def find(self, authorization: str | None) -> Session:
        """Return the session of the header `Authorization: Bearer TOKEN`. `ApiError` if there is none.

        410 for a session that was given up lately, which clients do not try again; else 401.
        """
        kind, _, token = (authorization or "").partition(" ")
        digest = _digest(token.strip()) if kind.lower() == "bearer" else b""
        if digest in self._given_up:
            raise _given_up()
        if (session := self._by_token.get(digest)) is None:
            raise unauthorized()
        return session


def _given_up() -> ApiError:
    return ApiError(
        "this attempt was given up: the run has ended or was interrupted, or its step's deadline has passed",
        status=410,
        code="attempt_given_up",
    )


def _digest(token: str) -> bytes:
    """The key of a token: comparing digests takes the same time for all wrong tokens."""
    return hashlib.sha256(token.encode("utf-8", "replace")).digest()
