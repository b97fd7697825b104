"""The player of an episode: the model and the environment take turns until its end.

An episode that fails (an exception or a deadline of its environment, a turn that the chat template does not take) costs
nothing but itself. What an environment returns is checked, and ends the rollout if it is wrong: see `EpisodeChecks`.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from rlframework.base.errors import DataError, ImageError, UserError
from rlframework.datasets.chat.chat_format import ChatFormat, characters_of, is_large
from rlframework.datasets.pictures import PictureReader
from rlframework.environments.threads import failing_alone
from rlframework.environments.tool_episodes import is_malformed
from rlframework.environments.user_tracebacks import described, traceback_of
from rlframework.interfaces.environment import Environment, Episode, Sample, StepOutcome
from rlframework.interfaces.messages import FunctionCall, Message, ToolSpec, encodable, pictures_of, text_of
from rlframework.observers.timeline import ENVIRONMENT, timed
from rlframework.rollout.episode_thread import Bridge
from rlframework.rollout.outcomes import EpisodeChecks
from rlframework.rollout.result import Limit, PlayedEpisode
from rlframework.rollout.seeds import turn_seed
from rlframework.rollout.trajectory import Trajectory

if TYPE_CHECKING:
    from rlframework.config.sections import EnvironmentConfig

_LOG = logging.getLogger(__name__)

_GRACE = 1.0
"""Seconds that a call has to end after its deadline, when it is cancelled."""


class _EpisodeFailed(Exception):
    """The environment of an episode has failed; the message is for the samples of the run.

    `traceback`: of the environment's code, if it has raised.
    """

    def __init__(self, message: str, traceback: str = "") -> None:
        super().__init__(message)
        self.traceback = traceback


class _NoCoroutine(Exception):
    """A method of an episode is not async."""


async def _awaited(call: Callable[[], Any]) -> Any:
    """Return what an async method returns. Raises `_NoCoroutine` if it is not async."""
    with failing_alone():
        awaitable = call()
        if not inspect.isawaitable(awaitable):
            raise _NoCoroutine
        return await awaitable


@dataclass(eq=False)
class _State:
    """An episode in progress. `prompt`: the exact tokens that the next turn continues."""

    sample: Sample
    seed: int
    session: str
    checks: EpisodeChecks
    tools: tuple[ToolSpec, ...] = ()
    messages: list[Message] = field(default_factory=list)
    prompt: list[int] = field(default_factory=list)
    trajectory: Trajectory = field(default_factory=Trajectory)
    transcript: list[dict[str, Any]] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    calls: int = 0
    malformed: int = 0
    limit: Limit | None = None
    completion: str = ""

    def add(self, messages: Sequence[Message]) -> None:
        """Add messages that the model reads."""
        self.messages += messages
        self.transcript += [{**message, "trained": False} for message in messages]

    def played(self, failure: str, traceback: str) -> PlayedEpisode:
        trajectory = self.trajectory
        return PlayedEpisode(
            self.sample, trajectory.rows, self.transcript, self.outcomes, trajectory.turns, trajectory.breaks,
            self.calls, self.malformed, self.limit, failure, self.completion, traceback,
        )  # fmt: skip


class EpisodePlayer:
    """Plays episodes of `environment`; `bridge` completes their prompts."""

    def __init__(self, environment: Environment, config: EnvironmentConfig, chat: ChatFormat, bridge: Bridge) -> None:
        self._environment, self._config, self._chat, self._bridge = environment, config, chat, bridge
        limits = [limit for limit in (config.max_episode_tokens, bridge.positions) if limit is not None]
        self._most_tokens = min(limits, default=None)
        self._reader = None if config.images is None else PictureReader(config.images, Path())

    async def play(self, sample: Sample, seed: int, task_seed: int, session: str) -> PlayedEpisode:
        """Play one episode: turns depend on `seed`, its environment on `task_seed`. Its `close` is always called."""
        state = _State(sample, seed, session, EpisodeChecks(self._config.name, sample, self._reader))
        return state.played(*await self._play(state, task_seed))

    async def _play(self, state: _State, task_seed: int) -> tuple[str, str]:
        """Play `state` to its end; return why it failed and the traceback, or empty texts."""
        try:
            with failing_alone():
                episode = self._environment.episode(state.sample.copy(), task_seed)
        except Exception as error:  # noqa: BLE001 - an environment may raise anything, which is its episode's failure
            return described(error, "episode"), traceback_of(error)
        try:
            await self._begin(state, episode)
            while not (state.limit or await self._turn(state, episode)):
                if state.limit is None and state.trajectory.turns >= self._config.max_turns:
                    state.limit = "max_turns"
            return "", ""
        except _EpisodeFailed as failure:
            return str(failure), failure.traceback
        finally:
            await self._close(state, episode)

    async def _begin(self, state: _State, episode: Episode) -> None:
        messages = await self._call("reset", 0, episode.reset)
        state.add(state.checks.start(messages))
        state.tools = state.checks.tools(episode.tools)
        self._chat.require_calls(state.tools)
        if self._is_too_long(state):
            raise _EpisodeFailed(
                f"its first prompt has {characters_of(state.messages):,} characters, which leaves no room for a turn: "
                f"the most is {self._most_tokens} tokens (environment.max_episode_tokens, or the model's positions)"
            )
        state.prompt = await self._rendered(state, lambda: self._chat.prompt(state.messages, state.tools))
        if self._room(state) < 1:
            raise _EpisodeFailed(
                f"its first prompt has {len(state.prompt)} tokens, which leaves no room for a turn: the most is "
                f"{self._most_tokens} (environment.max_episode_tokens, or the model's positions)"
            )

    async def _turn(self, state: _State, episode: Episode) -> bool:
        """Sample a turn and give it to the environment; return whether the episode is done."""
        number = state.trajectory.turns + 1
        seed = turn_seed(state.seed, number - 1)
        prompt, pictures = torch.tensor(state.prompt), pictures_of(state.messages)
        media = self._chat.media(pictures)
        room = self._room(state)
        result = await self._bridge.complete(prompt, seed, room, state.session, media=media)
        row = state.trajectory.add(prompt, result, pictures)
        ids = result.token_ids.tolist()
        message = self._chat.parse(ids, state.tools, position=len(state.messages))
        calls = message.get("tool_calls", ())
        state.calls += len(calls)
        state.malformed += sum(is_malformed(call, state.tools) for call in calls)
        state.completion = text_of(message)
        turn: dict[str, Any] = {**message, "trained": True, **({"row": row + 1} if row else {})}
        state.transcript.append(turn)
        with timed(self._bridge.timeline, ENVIRONMENT, "step"):
            given = await self._call("step", number, partial(episode.step, message))
        outcome = state.checks.outcome(given, number, calls)
        state.outcomes.append(outcome)
        turn["reward"] = outcome.reward
        if result.finish_reason != "stop":
            state.limit = "max_episode_tokens" if room < self._bridge.max_new_tokens else "max_new_tokens"
        elif not outcome.done:
            await self._observe(state, ids, message, outcome.observations)
        return outcome.done

    async def _observe(self, state: _State, ids: list[int], message: Message, observations: Sequence[Message]) -> None:
        """Extend the conversation by the model's turn and what follows it; it is truncated if that leaves no room."""
        state.messages.append(message)
        before, history = list(state.messages), [*state.prompt, *ids]
        state.add(observations)
        if self._is_too_long(state):
            state.limit = "max_episode_tokens"
            return

        def extended() -> list[int]:
            found = self._chat.extend(history, before, observations, state.tools)
            return self._chat.prompt(state.messages, state.tools) if found is None else found

        state.prompt = await self._rendered(state, extended)
        if self._room(state) < 1:
            state.limit = "max_episode_tokens"

    def _room(self, state: _State) -> int:
        """Return the most tokens of the next turn."""
        most = self._bridge.max_new_tokens
        return most if self._most_tokens is None else min(most, self._most_tokens - len(state.prompt))

    def _is_too_long(self, state: _State) -> bool:
        """Whether the conversation has too many characters to fit, which is known before they are made tokens."""
        return self._most_tokens is not None and self._chat.is_longer(state.messages, self._most_tokens)

    async def _rendered(self, state: _State, render: Callable[[], list[int]]) -> list[int]:
        try:
            return await asyncio.to_thread(render) if is_large(state.messages, state.tools) else render()
        except DataError as error:
            if not isinstance(error, ImageError) and (written := self._unrenderable(state)):
                raise _EpisodeFailed(
                    f"what the model wrote up to turn {state.trajectory.turns} cannot be rendered: {error}; {written}"
                ) from error
            where = state.checks.where(state.trajectory.turns)
            raise DataError(
                f"environment {self._config.name!r} returned {where} messages that cannot be rendered: {error}"
            ) from error

    def _unrenderable(self, state: _State) -> str:
        """Return what in the model's turns the chat template does not take; empty if it rejects the other messages.

        It rejects the others if it does so with plain answers and sound calls in place of what the model wrote.
        """
        turns = [turn for turn in state.transcript if turn["trained"]]
        others = [_plain(message, state.tools) for message in state.messages]
        try:
            self._chat.prompt(others, state.tools)
        except DataError:
            return ""
        if calls := [call["function"] for turn in turns for call in turn.get("tool_calls", ())]:
            return f"its last tool call is {calls[-1]!r:.500}"
        return f"its last turn is {turns[-1]['content']!r:.500}" if turns else ""

    async def _call(self, method: str, turn: int, call: Callable[[], Any]) -> Any:
        """Await a method of the environment's episode; raise `_EpisodeFailed` for an exception and a deadline."""
        where = f"{method}, turn {turn}" if turn else method
        seconds = self._config.step_timeout
        task = asyncio.ensure_future(_awaited(call))
        try:
            await asyncio.wait({task}, timeout=seconds)
        finally:
            in_time = task.done()
            if not in_time:
                task.cancel()
                await asyncio.wait({task}, timeout=_GRACE)
        if not in_time:
            late = f"{where} took more than environment.step_timeout={seconds:g} seconds"
            raise _EpisodeFailed("; ".join((late, *_notes(task))))
        if task.cancelled():
            raise _EpisodeFailed(f"{where} was cancelled by the environment")
        if (raised := task.exception()) is not None:
            if isinstance(raised, _NoCoroutine):
                raise UserError(
                    f"{method} of the episodes of environment {self._config.name!r} is not a coroutine: define it with "
                    f"`async def {method}`"
                )
            raise _EpisodeFailed(described(raised, where), traceback_of(raised)) from raised
        return task.result()

    async def _close(self, state: _State, episode: Episode) -> None:
        try:
            await self._call("close", 0, episode.close)
        except _EpisodeFailed as failure:  # its rewards are complete, so that it counts
            _LOG.warning("an episode of sample %r was not closed: %s", state.sample.id, failure)


def _notes(late: asyncio.Future[Any]) -> Sequence[str]:
    """The notes of an environment on the cancellation of `late`, which say what it waited for; marks errors as seen."""
    try:
        if late.done():
            late.exception()
    except asyncio.CancelledError as error:
        return getattr(error, "__notes__", ())
    return ()


def _plain(message: Message, tools: Sequence[ToolSpec]) -> Message:
    """`message` without what the model wrote: an answer, or calls of the first of `tools`, that all templates take.

    Halves of characters in a tool's answer are replaced: the arguments of its call may have had them.
    """
    if message["role"] == "tool" and isinstance(message["content"], str):
        return {**message, "content": encodable(message["content"])}
    if message["role"] != "assistant":
        return message
    if not (calls := message.get("tool_calls")) or not tools:
        return {"role": "assistant", "content": "1"}
    sound: FunctionCall = {"name": tools[0]["function"]["name"], "arguments": "{}"}
    return {"role": "assistant", "content": "", "tool_calls": [{**call, "function": sound} for call in calls]}
