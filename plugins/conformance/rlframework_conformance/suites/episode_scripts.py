"""Scripted models for episodes: fixed and random assistant messages, and tool calls, sensible and malformed."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlframework.interfaces.environment import Episode, Sample, StepOutcome
from rlframework.interfaces.messages import Message, ToolCall, ToolSpec, text_of
from rlframework_conformance.suites.environment_harness import right_answer

TURNS = 5
"""The most turns of a scripted model."""
VALUES: Mapping[str, Any] = {
    "string": "1", "integer": 1, "number": 1.5, "boolean": True, "array": [], "object": {}, "null": None,
}  # fmt: skip
"""A value of each type of JSON schema."""


@dataclass
class Course:
    """The course of an episode: the messages of `reset`, the tools, and each turn of the model with its outcome."""

    start: Sequence[Message] = ()
    tools: Sequence[ToolSpec] = ()
    turns: list[tuple[Message, StepOutcome]] = field(default_factory=list)

    @property
    def seen(self) -> list[Message]:
        """The messages that the model has read."""
        return [*self.start, *(message for _, outcome in self.turns for message in outcome.observations)]


Script = Callable[[Sample, Course], Message]
"""Returns the model's next turn."""


def answers(sample: Sample, course: Course) -> Message:
    """Reply with the sample's answer."""
    return {"role": "assistant", "content": right_answer(sample)}


def calls(sample: Sample, course: Course) -> Message:
    """Call all tools in the first two turns, then answer."""
    if not course.tools or len(course.turns) >= 2:
        return words(sample, course) if not right_answer(sample) else answers(sample, course)
    made = [
        call(f"call{len(course.turns)}{number:04}", tool["function"]["name"], json.dumps(arguments(tool)))
        for number, tool in enumerate((*course.tools, *course.tools))
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def words(sample: Sample, course: Course) -> Message:
    """Reply with a random word that the model has read, which may be an action of a game."""
    generator = random.Random(f"{sample.id} {len(course.turns)}")
    found = [word.strip(".,:;!?'\"()[]") for message in course.seen for word in text_of(message).split()]
    return {"role": "assistant", "content": generator.choice([word for word in found if word] or ["?"])}


SCRIPTS: Mapping[str, Script] = {"answers": answers, "tool calls": calls, "random words": words}


def call(name_of_call: str, name: str, text: str) -> ToolCall:
    """Return a tool call."""
    return {"id": name_of_call, "type": "function", "function": {"name": name, "arguments": text}}


def arguments(tool: ToolSpec) -> dict[str, Any]:
    """Return arguments of the types that a tool's schema asks for."""
    properties = tool["function"]["parameters"].get("properties", {})
    return {name: _value(schema) for name, schema in properties.items()}


def _value(schema: Mapping[str, Any]) -> Any:
    if "enum" in schema:
        return schema["enum"][0]
    if options := schema.get("anyOf"):
        return _value(options[0])
    kind = schema.get("type", "string")
    return VALUES.get(kind if isinstance(kind, str) else kind[0], "1")


def malformed_calls(tools: Sequence[ToolSpec]) -> dict[str, tuple[str, str]]:
    """Return names and arguments of calls that cannot be made, by what is wrong with them."""
    name = tools[0]["function"]["name"] if tools else "look"
    found = {
        "no JSON": (name, '{"a": '),
        "no object": (name, "[1, 2]"),
        "an unknown name": ("no_such_tool", "{}"),
        "no name": ("", "<no call>"),
        "an unknown argument": (name, '{"no_such_argument": 1}'),
    }
    for tool in tools:
        given = arguments(tool)
        if given:
            wrong = json.dumps({key: {"no": ["such", "type"]} for key in given})
            return {**found, "wrong types": (tool["function"]["name"], wrong)}
    return found


async def begin(episode: Episode) -> Course:
    """Reset `episode`."""
    start = await episode.reset()
    return Course(list(start), list(episode.tools))


async def turn(episode: Episode, sample: Sample, course: Course, script: Script) -> bool:
    """Play a turn; return whether the episode is over, or the script has played all its turns."""
    message = script(sample, course)
    outcome = await episode.step(message)
    course.turns.append((message, outcome))
    return outcome.done or len(course.turns) >= TURNS


async def play(episode: Episode, sample: Sample, script: Script) -> Course:
    """Play an episode to its end, or for `TURNS` turns, and close it."""
    try:
        course = await begin(episode)
        while not await turn(episode, sample, course, script):
            pass
        return course
    finally:
        await episode.close()


async def interleaved(episodes: Sequence[Episode], samples: Sequence[Sample], script: Script) -> list[Course]:
    """Play episodes in turns: each has its first turn before any has its second."""
    courses = [await begin(episode) for episode in episodes]
    waiting = list(range(len(episodes)))
    while waiting:
        waiting = [k for k in waiting if not await turn(episodes[k], samples[k], courses[k], script)]
    for episode in episodes:
        await episode.close()
    return courses
