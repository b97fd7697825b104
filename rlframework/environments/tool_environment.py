"""A plain class with typed methods as an environment: `{name: tools, tools: my:Calculator, path: rows.jsonl}`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlframework.base.errors import ConfigError, RLFrameworkError
from rlframework.config.environments import ToolDataConfig, ToolsConfig
from rlframework.environments import threads
from rlframework.environments.counted_failures import AnswerScores
from rlframework.environments.dataset import DatasetEnvironment
from rlframework.environments.reward_calls import Failure, read_result
from rlframework.environments.tool_episodes import Score, ToolEpisode, ToolSession
from rlframework.environments.tools import Toolbox
from rlframework.interfaces.environment import Episode, Sample, StepOutcome
from rlframework.interfaces.messages import Message, ToolCall, ToolSpec, text_of
from rlframework.plugins.user_defined import load_import_path


class ToolDataEnvironment(DatasetEnvironment):
    """Rows of data as tasks for episodes with tools. Subclasses give the tools of an episode."""

    def __init__(self, config: ToolDataConfig, *, seed: int) -> None:
        """Open the data, see `DatasetEnvironment`."""
        super().__init__(config, seed=seed)
        self.counts_calls = False  # `AnswerScores` counts
        self._max_calls = config.max_calls_per_turn
        self._scores = AnswerScores(super().step, config.max_reward_failures)

    def session(self, sample: Sample, seed: int) -> tuple[ToolSession, Score]:
        """Return the tools of a new episode, and what scores its answer. Must be quick: it runs in the event loop."""
        raise NotImplementedError

    def episode(self, sample: Sample, seed: int) -> Episode:
        """Return a new episode of `sample`, with tools of its own."""
        return ToolEpisode(sample, *self.session(sample, seed), max_calls=self._max_calls)

    def shutdown(self) -> None:
        """End the process of the reward function."""
        self._scores.close(super().shutdown)


class ToolEnvironment(ToolDataEnvironment):
    """Episodes in which the model calls the methods of a new object of the class `ToolsConfig.tools`."""

    def __init__(self, config: ToolsConfig, *, seed: int) -> None:
        """Raises `ConfigError` if the class cannot be used, or if nothing or several things score the answers."""
        self._class = load_tools(config.tools)
        self._path = config.tools
        self._toolbox = Toolbox(self._class, limit=config.max_result_characters)
        self._given = _given(self._class, ("sample", "seed"), config.tools)
        reward = getattr(self._class, "reward", None)
        if config.scores_completions == (reward is not None):
            raise ConfigError(
                f"environment.tools={config.tools!r}: set one of environment.reward, environment.check, and a method "
                f"`reward(self, completion)` of the class; {'both are' if config.scores_completions else 'none is'} set"
            )
        super().__init__(config, seed=seed)
        self.scores = True
        self._own = None if reward is None else _given(reward, ("sample", "completion"), "reward", skip=1)

    def session(self, sample: Sample, seed: int) -> tuple[ToolSession, Score]:
        """Return the methods of an object that `reset` makes, and its method `reward` or the configured reward."""
        given = {name: value for name, value in (("sample", sample), ("seed", seed)) if name in self._given}
        session = MethodSession(self._class, given, self._toolbox)
        return session, self._scores.score if self._own is None else self._own_score(session, self._own)

    def _own_score(self, session: MethodSession, names: Sequence[str]) -> Score:
        async def score(sample: Sample, message: Message) -> StepOutcome:
            values = {"sample": sample, "completion": text_of(message)}
            what = f"the method reward of environment.tools={self._path!r}"
            try:
                returned = await threads.call(session.holder.reward, **{name: values[name] for name in names})
            except Exception as error:
                self._toolbox.log("reward", error)
                raise RLFrameworkError(f"{what} raised {type(error).__name__}: {error}") from error
            result = read_result(returned)
            if isinstance(result, Failure):
                raise RLFrameworkError(f"{what} failed: {result.text}")
            metrics = {name: value for name, value in result.metrics.items() if name != "reward_failures"}
            return StepOutcome(result.reward, metrics=metrics)

        return score


class MethodSession(ToolSession):
    """The methods of an object that is made when the episode starts, by calling `make` with `given` in a thread."""

    holder: Any = None

    def __init__(self, make: Callable[..., Any], given: Mapping[str, Any], toolbox: Toolbox) -> None:
        self._make, self._given, self._toolbox = make, given, toolbox

    async def open(self) -> Sequence[ToolSpec]:
        """Make the object."""
        self.holder = await threads.call(self._make, **self._given)
        return self._toolbox.specs

    async def call(self, call: ToolCall) -> Message:
        """Call the object's method, see `Toolbox.call`."""
        return await self._toolbox.call(self.holder, call)

    async def close(self) -> None:
        """Call the object's method `close`, if it has one."""
        if self.holder is not None and hasattr(self.holder, "close"):
            await threads.call(self.holder.close)


def load_tools(path: str) -> type:
    """Return the class at the import path `path`. Raises `ConfigError` if it is none, or has no usable tools."""
    try:
        found = load_import_path(path)
    except ConfigError as error:
        raise ConfigError(f"environment.tools: {error}") from error
    if not isinstance(found, type):
        raise ConfigError(f"environment.tools={path!r} is not a class, but {type(found).__name__}; give a class")
    Toolbox(found)
    return found


def _given(function: Callable[..., Any], allowed: Sequence[str], what: str, skip: int = 0) -> tuple[str, ...]:
    """The parameters of `function` that it is called with, by name. Raises `ConfigError` for others."""
    if isinstance(function, type) and function.__init__ is object.__init__:  # type: ignore[misc]
        return ()
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    names = tuple(p.name for p in parameters if p.name in allowed)
    other = [p.name for p in parameters if p.name not in allowed and p.default is p.empty and p.kind < p.VAR_POSITIONAL]
    if other:
        raise ConfigError(f"environment.tools: {what!r} takes {', '.join(other)}; it may take {', '.join(allowed)}")
    return names
