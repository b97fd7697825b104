"""Episodes with tools: a turn with tool calls is answered by the tools, one without is the answer and scored."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence

from rlframework.environments.tool_calls import refusal
from rlframework.interfaces.environment import Episode, Sample, StepOutcome
from rlframework.interfaces.messages import Message, ToolCall, ToolSpec


class ToolSession(ABC):
    """The tools of one episode, with their state."""

    @abstractmethod
    async def open(self) -> Sequence[ToolSpec]:
        """Start, and return the tools."""

    @abstractmethod
    async def call(self, call: ToolCall) -> Message:
        """Return the tool message that answers `call`. A call that cannot be made is answered with the reason."""

    async def close(self) -> None:
        """Release the session's resources. Called once, also without `open`."""


Score = Callable[[Sample, Message], Awaitable[StepOutcome]]
"""Scores an assistant message that calls no tool."""


class ToolEpisode(Episode):
    """An attempt at `sample` with the tools of `session`, until a turn calls no tool, which `score` scores.

    Calls of a turn are made one after the other; those beyond the first `max_calls` are refused.
    """

    def __init__(self, sample: Sample, session: ToolSession, score: Score, *, max_calls: int) -> None:
        self._sample, self._session, self._score, self._max_calls = sample, session, score, max_calls

    async def reset(self) -> Sequence[Message]:
        """Open the session, and return the sample's messages."""
        self.tools = tuple(await self._session.open())
        return self._sample.messages

    async def step(self, message: Message) -> StepOutcome:
        """Answer the tool calls of `message`, each by one tool message in order; score it if there are none."""
        calls = message.get("tool_calls", ())
        if not calls:
            return await self._score(self._sample, message)
        answers = [await self._answer(call) for call in calls[: self._max_calls]]
        reason = f"too many calls in one turn; the first {self._max_calls} were made"
        refused = [refusal(call, reason) for call in calls[self._max_calls :]]
        return StepOutcome(0.0, done=False, observations=(*answers, *refused))

    async def _answer(self, call: ToolCall) -> Message:
        try:
            return await self._session.call(call)
        except asyncio.CancelledError as error:
            error.add_note(f"it was in a call of the tool {call['function']['name']!r:.100}")
            raise

    async def close(self) -> None:
        """Close the session."""
        await self._session.close()
