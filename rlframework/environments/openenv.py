"""Episodes of an OpenEnv server over its WebSocket. The server and its requirements stay in another environment.

A connection is a session with an environment of its own. Messages are JSON: `{"type": "reset", "data": {"seed": 1}}`
and `{"type": "step", "data": ACTION}` are answered by `{"type": "observation", "data": {observation, reward, done}}` or
by `{"type": "error", "data": {message, code}}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rlframework.config.episode_environments import OpenEnvConfig
from rlframework.environments.seeded_tasks import SeededTasks
from rlframework.environments.verifiable import prompt_messages
from rlframework.errors import ConfigError, RLFrameworkError
from rlframework.interfaces.environment import Environment, Episode, Sample, Split, StepOutcome
from rlframework.interfaces.messages import Message, text_of

_INVALID = ("VALIDATION_ERROR", "INVALID_JSON")
"""Codes of errors about an action that the environment did not take."""

_LARGEST = 16 << 20


class OpenEnvEnvironment(Environment):
    """The episodes of the server at `OpenEnvConfig.url`; a task is a seed of `reset`, which all its attempts share."""

    def __init__(self, config: OpenEnvConfig, *, seed: int) -> None:
        """Draw the seeds; no connection is made yet. Raises `ConfigError` if the package `websockets` is missing."""
        try:
            import websockets  # noqa: F401 - whether it is installed
        except ImportError as error:
            raise ConfigError(
                "environment.name=openenv needs websockets: pip install 'rlframework-core[openenv]'"
            ) from error
        self._config = config
        self._tasks = SeededTasks(config.train_samples, config.validation_samples, seed, self._sample)

    def samples(self, split: Split) -> Sequence[Sample]:
        """The seeds of `split`, as `metadata["seed"]`."""
        return self._tasks.of(split)

    def episode(self, sample: Sample, seed: int) -> Episode:
        """Return a new episode with a connection of its own. `seed` has no effect: the task's seed decides."""
        return OpenEnvEpisode(self._config, sample)

    def _sample(self, number: int) -> Sample:
        messages = prompt_messages(self._config.system_prompt, self._config.prompt.replace("{observation}", ""))
        return Sample(f"seed {number}", messages, "", metadata={"seed": number})


class OpenEnvEpisode(Episode):
    """One attempt: the text of a turn is a field of an action, an observation is a user message."""

    def __init__(self, config: OpenEnvConfig, sample: Sample) -> None:
        self._config, self._sample = config, sample
        self._socket: Any = None
        self._total = 0.0

    async def reset(self) -> Sequence[Message]:
        """Connect, and start with the task's seed."""
        from websockets.asyncio.client import connect

        url, seconds = self._config.url, self._config.connect_timeout
        try:
            self._socket = await connect(url, open_timeout=seconds, max_size=_LARGEST, proxy=None)
        except (TimeoutError, OSError) as error:
            raise RLFrameworkError(
                f"no OpenEnv server answers at environment.url={url!r}: {type(error).__name__}: {error}"
            ) from error
        data = await self._ask("reset", {"seed": self._sample.metadata["seed"]})
        shown = self._config.prompt.replace("{observation}", self._seen(data))
        return prompt_messages(self._config.system_prompt, shown)

    async def step(self, message: Message) -> StepOutcome:
        """Send the turn as an action. An action that the server refuses is answered with the reason."""
        try:
            data = await self._ask("step", {self._config.action: text_of(message)})
        except _Refused as error:
            return StepOutcome(0.0, done=False, observations=({"role": "user", "content": f"error: {error}"},))
        reward = float(data.get("reward") or 0.0)
        self._total += reward
        if data.get("done"):
            return StepOutcome(reward, metrics={"accuracy": float(self._total >= self._config.solved_reward)})
        return StepOutcome(reward, done=False, observations=({"role": "user", "content": self._seen(data)},))

    async def close(self) -> None:
        """End the session."""
        if self._socket is not None:
            await self._socket.close()

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        from websockets.exceptions import WebSocketException

        where = f"the OpenEnv server at environment.url={self._config.url!r}"
        try:
            await self._socket.send(json.dumps({"type": kind, "data": data}))
            answer = json.loads(await self._socket.recv())
        except (OSError, ValueError, WebSocketException) as error:
            raise RLFrameworkError(f"{where} failed at {kind}: {type(error).__name__}: {error}") from error
        found = answer.get("data") if isinstance(answer, dict) else None
        if not isinstance(found, dict):
            raise RLFrameworkError(f"{where} answered {kind} with {answer!r:.200}, which has no data")
        if answer.get("type") == "error":
            if kind == "step" and found.get("code") in _INVALID:
                raise _Refused(str(found.get("message"))[:1000])
            raise RLFrameworkError(f"{where} answered {kind} with the error {found!r:.500}")
        return found

    def _seen(self, data: Mapping[str, Any]) -> str:
        observation, name = data.get("observation"), self._config.observation
        if name:
            if not isinstance(observation, dict) or name not in observation:
                known = sorted(observation) if isinstance(observation, dict) else observation
                raise RLFrameworkError(f"environment.observation={name!r} is not in the observation, which has {known}")
            observation = observation[name]
        return observation if isinstance(observation, str) else json.dumps(observation)


class _Refused(Exception):
    """The server did not take the action."""
