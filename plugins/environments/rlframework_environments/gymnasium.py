"""Environments of Gymnasium whose observations and actions are text or discrete, as episodes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rlframework.base.errors import ConfigError
from rlframework.environments import threads
from rlframework.environments.verifiable import prompt_messages
from rlframework.interfaces.environment import Episode, Sample, StepOutcome
from rlframework.interfaces.messages import Message, encodable, text_of
from rlframework.plugins.discovery import make_current_directory_importable
from rlframework_environments.config import GymnasiumConfig
from rlframework_environments.seeded_tasks import SeededEnvironment


class GymnasiumEnvironment(SeededEnvironment):
    """The episodes of `GymnasiumConfig.id`."""

    def __init__(self, config: GymnasiumConfig, *, seed: int) -> None:
        """Make one environment to look at its spaces. Raises `ConfigError` if it cannot be made or played in text."""
        self._config = config
        made = make(config)
        try:
            self._names = _action_names(config, made.action_space)
            if not (config.render or _is_readable(made.observation_space)):
                raise ConfigError(
                    f"environment.id={config.id!r} has observations {made.observation_space}, which are neither "
                    "discrete nor text; set environment.render=true if it renders text, or wrap it"
                )
        finally:
            made.close()
        super().__init__(config, seed, _filled(config.prompt, self._names, ""))

    def episode(self, sample: Sample, seed: int) -> Episode:
        """Return a new episode with an environment of its own. `seed` has no effect: the task's seed decides."""
        return GymnasiumEpisode(self._config, self._names, sample)


class GymnasiumEpisode(Episode):
    """One attempt: the model's turns are actions, what it sees are user messages."""

    def __init__(self, config: GymnasiumConfig, names: Sequence[str], sample: Sample) -> None:
        self._config, self._names, self._sample = config, names, sample
        self._numbers = {name.lower(): number for number, name in enumerate(names)}
        self._total = 0.0
        self._made: Any = None

    async def reset(self) -> Sequence[Message]:
        """Make the environment and start it with the task's seed."""
        self._made = await threads.call(make, self._config)
        observation, _ = await threads.call(self._made.reset, seed=self._sample.metadata["seed"])
        shown = _filled(self._config.prompt, self._names, await self._seen(observation))
        return prompt_messages(self._config.system_prompt, shown)

    async def step(self, message: Message) -> StepOutcome:
        """Play the action that `message` names; a reply that names none is answered with the actions."""
        text = text_of(message).strip()
        action = self._action(text)
        if action is None:
            reward = self._config.invalid_action_reward
            asked = f"{text[:80]!r} is not an action; reply with one of: {', '.join(self._names)}"
            return StepOutcome(reward, done=False, observations=({"role": "user", "content": asked},))
        observation, reward, terminated, truncated, _ = await threads.call(self._made.step, action)
        self._total += float(reward)
        if terminated or truncated:
            return StepOutcome(float(reward), metrics={"accuracy": float(self._total >= self._config.solved_reward)})
        shown = _filled(self._config.observation_prompt, self._names, await self._seen(observation))
        return StepOutcome(float(reward), done=False, observations=({"role": "user", "content": shown},))

    async def close(self) -> None:
        """Close the environment."""
        if self._made is not None:
            await threads.call(self._made.close)

    def _action(self, text: str) -> Any:
        """The action that `text` is: one of the names in any case, or any text within the space. None if it is none."""
        if self._names:
            number = self._numbers.get(text.lower())
            return None if number is None else number + int(self._made.action_space.start)
        return text if self._made.action_space.contains(text) else None

    async def _seen(self, observation: Any) -> str:
        if not self._config.render:
            return readable(observation)
        rendered = await threads.call(self._made.render)
        if not isinstance(rendered, str):
            raise ConfigError(
                f"environment.id={self._config.id!r} renders {type(rendered).__name__} instead of text; set "
                "environment.render=false"
            )
        return re.sub(r"\x1b\[(\d+;?)*m(.?)", _marked, rendered).strip("\n")


def make(config: GymnasiumConfig) -> Any:
    """Return a new environment. Raises `ConfigError` that says why it cannot be made."""
    try:
        import gymnasium
    except ImportError as error:
        raise ConfigError(
            "environment.name=gymnasium needs Gymnasium: pip install 'rlframework-core[gymnasium]'"
        ) from error
    make_current_directory_importable()
    mode: dict[str, Any] = {"render_mode": "ansi"} if config.render else {}
    try:
        return gymnasium.make(config.id, **mode, **config.arguments)
    except Exception as error:
        raise ConfigError(f"gymnasium.make({config.id!r}) raised {type(error).__name__}: {error}") from error


def readable(observation: Any) -> str:
    """Return an observation as text: texts as they are, numbers and arrays of numbers as JSON."""
    if isinstance(observation, str):
        return encodable(observation)
    return json.dumps(observation, default=lambda value: value.tolist() if hasattr(value, "tolist") else str(value))


def _action_names(config: GymnasiumConfig, space: Any) -> tuple[str, ...]:
    """The names of discrete actions, in order; none if actions are text."""
    from gymnasium.spaces import Discrete, Text

    if isinstance(space, Text):
        if config.actions:
            raise ConfigError(f"environment.actions: the actions of {config.id!r} are text; remove the key")
        return ()
    if not isinstance(space, Discrete):
        raise ConfigError(f"environment.id={config.id!r} has actions {space}; only Discrete and Text can be played")
    if config.actions and len(config.actions) != int(space.n):
        raise ConfigError(
            f"environment.actions has {len(config.actions)} names for the {space.n} actions of {config.id!r}"
        )
    return config.actions or tuple(str(int(space.start) + number) for number in range(int(space.n)))


def _is_readable(space: Any) -> bool:
    from gymnasium.spaces import Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple

    if isinstance(space, Dict):
        return all(map(_is_readable, space.values()))
    if isinstance(space, Tuple):
        return all(map(_is_readable, space))
    return isinstance(space, (Discrete, MultiBinary, MultiDiscrete, Text))


def _filled(template: str, names: Sequence[str], observation: str) -> str:
    """Fill a prompt, whose other braces stay as they are."""
    return template.replace("{actions}", ", ".join(names)).replace("{observation}", observation).strip()


def _marked(found: re.Match[str]) -> str:
    """Put what is highlighted in colour in square brackets: the only sign of a player's place in some games."""
    return f"[{found[2]}]" if found[1] not in ("0", None) and found[2] else found[2]
