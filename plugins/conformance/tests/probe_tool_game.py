"""A small environment of episodes for the kit's own tests: count to a number with a tool, with a reward each turn."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from rlframework.config.sections import EnvironmentConfig
from rlframework.interfaces.environment import Environment, Episode, Sample, Split, StepOutcome
from rlframework.interfaces.messages import Message, ToolCall, ToolSpec, text_of

_TOOLS: tuple[ToolSpec, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"{name} a number",
            "parameters": {"type": "object", "properties": {"number": {"type": "integer"}}, "required": ["number"]},
        },
    }
    for name in ("add", "subtract")
)


class ToolGame(Environment):
    """Tasks "count to n", solved in two answers: the first is followed by a question, and both are scored."""

    def __init__(self, config: EnvironmentConfig, *, seed: int) -> None:
        numbers = random.Random(seed).sample(range(10, 100), 20)
        self._samples = [Sample(str(n), ({"role": "user", "content": f"Count to {n}."},), str(n)) for n in numbers]

    def samples(self, split: Split) -> Sequence[Sample]:
        """See `Environment`."""
        return self._samples[:12] if split == "train" else self._samples[12:]

    def episode(self, sample: Sample, seed: int) -> Episode:
        """See `Environment`."""
        return ToolGameEpisode(sample, seed)


class ToolGameEpisode(Episode):
    """A total that the tools change; answers are worth 0.5 each, plus 0.25 if a tool was called."""

    def __init__(self, sample: Sample, seed: int) -> None:
        self._sample, self._random = sample, random.Random(seed)
        self._total, self._answers, self._called = 0, 0, 0

    async def reset(self) -> Sequence[Message]:
        """See `Episode`."""
        self.tools = _TOOLS
        return [*self._sample.messages, {"role": "user", "content": f"Start at {self._random.randrange(9)}."}]

    async def step(self, message: Message) -> StepOutcome:
        """See `Episode`."""
        await asyncio.sleep(0.001)
        if calls := message.get("tool_calls", ()):
            return StepOutcome(0.125, False, tuple(map(self._answer, calls)), {"calls": float(len(calls))})
        self._answers += 1
        right = 0.5 * float(text_of(message).strip() == self._sample.answer) + 0.25 * float(self._called > 0)
        if self._answers == 2:
            return StepOutcome(right, metrics={"accuracy": float(right >= 0.5)})
        asked = f"Are you sure? The total is {self._total}."
        return StepOutcome(right, False, ({"role": "user", "content": asked},))

    def _answer(self, call: ToolCall) -> Message:
        name = call["function"]["name"]
        try:
            content = str(self._call(name, json.loads(call["function"]["arguments"])))
        except (ValueError, RecursionError) as error:
            content = f"error: {error}"
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}

    def _call(self, name: str, given: Any) -> int:
        if name not in ("add", "subtract"):
            raise ValueError(f"there is no tool {name!r}")
        if not (isinstance(given, Mapping) and given.keys() == {"number"} and isinstance(given["number"], int)):
            raise ValueError(f"{name} takes an integer `number`, not {given!r}")
        self._called += 1
        self._total += given["number"] if name == "add" else -given["number"]
        return self._total
