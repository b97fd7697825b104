"""Episodes of an OpenEnv server over its WebSocket. The server and its requirements stay in another environment.

A connection is a session with an environment of its own. Messages are JSON: `{"type": "reset", "data": {"seed": 1}}`
and `{"type": "step", "data": ACTION}` are answered by `{"type": "observation", "data": {observation, reward, done}}` or
by `{"type": "error", "data": {message, code}}`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from rlframework.base.errors import ConfigError, RLFrameworkError
from rlframework.environments.verifiable import prompt_messages
from rlframework.interfaces.environment import LARGEST_REWARD, Episode, Sample, StepOutcome
from rlframework.interfaces.messages import Message, encodable, text_of
from rlframework_environments.config import OpenEnvConfig
from rlframework_environments.seeded_tasks import SeededEnvironment

if TYPE_CHECKING:
    from websockets.asyncio.client import ClientConnection

_INVALID = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes of errors about an action that the environment did not take."""

_LARGEST = 16 << 20
"""Bytes of an answer."""

_AGAIN = 0.2
"""Seconds between two attempts at a server without room."""


class OpenEnvEnvironment(SeededEnvironment):
    """The episodes of the server at `OpenEnvConfig.url`."""

    def __init__(self, config: OpenEnvConfig, *, seed: int) -> None:
        """Draw the seeds; no connection is made yet. Raises `ConfigError` if the package `websockets` is missing."""
        try:
            import websockets  # noqa: F401 - whether it is installed
        except ImportError as error:
            raise ConfigError(
                "environment.name=openenv needs websockets: pip install 'rlframework-core[openenv]'"
            ) from error
        self._config = config
        super().__init__(config, seed, config.prompt.replace("{observation}", ""))

    def episode(self, sample: Sample, seed: int) -> Episode:
        """Return a new episode with a connection of its own. `seed` has no effect: the task's seed decides."""
        return OpenEnvEpisode(self._config, sample)


class OpenEnvEpisode(Episode):
    """One attempt: the text of a turn is a field of an action, an observation is a user message.

    What the server must not answer is a `RLFrameworkError` that names its address, the sample and the turn.
    """

    def __init__(self, config: OpenEnvConfig, sample: Sample) -> None:
        self._config, self._sample = config, sample
        self._socket: ClientConnection | None = None
        self._total, self._turn = 0.0, 0

    async def reset(self) -> Sequence[Message]:
        """Connect, and start with the task's seed. A server without room is asked again until `connect_timeout`."""
        end = time.monotonic() + self._config.connect_timeout
        while (data := await self._start(time.monotonic() < end)) is None:
            await asyncio.sleep(_AGAIN)
        if self._done("reset", data):
            self._fail("answered reset with an episode that is done")
        shown = self._config.prompt.replace("{observation}", self._seen(data))
        return prompt_messages(self._config.system_prompt, shown)

    async def step(self, message: Message) -> StepOutcome:
        """Send the turn as an action. An action that the server refuses is answered with the reason."""
        self._turn += 1
        try:
            data = await self._ask("step", {self._config.action: text_of(message)})
        except _ServerError as error:
            return StepOutcome(0.0, done=False, observations=({"role": "user", "content": self._refusal(error)},))
        reward, done = self._reward(data), self._done("step", data)
        self._total += reward
        if done:
            return StepOutcome(reward, metrics={"accuracy": float(self._total >= self._config.solved_reward)})
        return StepOutcome(reward, done=False, observations=({"role": "user", "content": self._seen(data)},))

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()

    async def _start(self, may_wait: bool) -> Mapping[str, Any] | None:
        """Connect and reset; None if the server has no room, and the episode may wait for it."""
        await self._connect()
        try:
            return await self._ask("reset", {"seed": self._sample.metadata["seed"]})
        except _ServerError as error:
            await self.close()
            if error.code == "CAPACITY_REACHED" and may_wait:
                return None
            room = "; lower environment.max_concurrent_episodes, or start the server with a higher max_concurrent_envs"
            self._fail(f"answered reset with the error {error}{room if error.code == 'CAPACITY_REACHED' else ''}")

    async def _connect(self) -> None:
        from websockets.asyncio.client import connect
        from websockets.exceptions import WebSocketException

        try:
            self._socket = await connect(
                self._config.url,
                open_timeout=self._config.connect_timeout,
                ping_interval=None,  # deadlines of steps limit a server that does not answer
                max_size=_LARGEST,
                proxy=None,
            )
        except (TimeoutError, OSError, WebSocketException) as error:
            self._fail(f"cannot be connected to: {type(error).__name__}: {error}", error)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the data that the server answers with. Raises `_ServerError` for an error that it reports."""
        from websockets.exceptions import ConnectionClosed, WebSocketException

        assert self._socket is not None
        try:
            with contextlib.suppress(ConnectionClosed):  # what the server wrote before it closed says why
                await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._socket.recv())
        except (OSError, ValueError, RecursionError, WebSocketException) as error:
            self._fail(f"failed at {kind}: {type(error).__name__}: {error}", error)
        found = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(found, dict) or answer.get("type") not in ("observation", "error"):
            self._fail(f"answered {kind} with {answer!r:.200}, which is neither an observation nor an error with data")
        if answer["type"] == "error":
            raise _ServerError(found)
        return found

    def _refusal(self, error: _ServerError) -> str:
        """Return the reason for the model, of an action that is not taken. Fails if that is not due to its text."""
        if error.code not in _INVALID:
            self._fail(f"answered step with the error {error}", error)
        if error.kinds & {"missing", "extra_forbidden"}:
            self._fail(
                f"does not take an action with the field {self._config.action!r} alone (environment.action): {error}",
                error,
            )
        return encodable(f"error: {error}")

    def _reward(self, data: Mapping[str, Any]) -> float:
        """The reward of a step; null is 0."""
        reward = data.get("reward")
        if reward is None:
            return 0.0
        if not isinstance(reward, (bool, int, float)) or not abs(reward) <= LARGEST_REWARD:
            self._fail(
                f"answered step with the reward {reward!r:.80}; it must be null or a number of at most "
                f"{LARGEST_REWARD:g} in size"
            )
        return float(reward)

    def _done(self, kind: str, data: Mapping[str, Any]) -> bool:
        """Whether the episode is done."""
        done = data.get("done", "missing")
        if not isinstance(done, bool):
            self._fail(f"answered {kind} with done={done!r:.80}; it must be true or false")
        return done

    def _seen(self, data: Mapping[str, Any]) -> str:
        """The part of the observation that the model sees, as text."""
        observation, name = data.get("observation"), self._config.observation
        if name:
            if not isinstance(observation, dict) or name not in observation:
                known = ", ".join(sorted(observation)) if isinstance(observation, dict) else f"{observation!r:.80}"
                self._fail(f"answered without environment.observation={name!r}; its observation has {known}")
            observation = observation[name]
        return encodable(observation if isinstance(observation, str) else json.dumps(observation))

    def _fail(self, what: str, error: BaseException | None = None) -> NoReturn:
        where = f"sample {self._sample.id!r}, {f'turn {self._turn}' if self._turn else 'reset'}"
        raise RLFrameworkError(
            f"the OpenEnv server at environment.url={self._config.url!r} {what} ({where})"
        ) from error


class _ServerError(Exception):
    """An error that the server reports; `kinds` are those of the fields of an action that it does not take."""

    def __init__(self, data: Mapping[str, Any]) -> None:
        self.code = str(data.get("code"))
        found = data.get("errors")
        fields = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
        self.kinds = {str(each.get("type")) for each in fields}
        reasons = "; ".join(str(each.get("msg")) for each in fields)
        super().__init__(f"{data.get('message')}{': ' if reasons else ''}{reasons}"[:1000])
