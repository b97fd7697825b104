"""The tree of a session's conversations."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from rlframework.generation.scheduler import Scheduler
from rlframework.interfaces.generation import GenerationRequest, SamplingParams
from rlframework.interfaces.messages import Message
from rlframework_serve import conversations
from rlframework_serve.conversations import Conversations, EngineSessions
from rlframework_serve.request_bodies import TurnRequest
from rlframework_serve.serving import shared_session
from rlframework_serve.sessions import Session


def said(role: str, content: str, **more: Any) -> Message:
    return {"role": role, "content": content, **more}  # type: ignore[return-value]


HI, BYE = said("user", "hi"), said("user", "bye")
YES, NO = said("assistant", "yes"), said("assistant", "no")


def test_the_longest_recorded_turn_is_found_with_all_its_tokens() -> None:
    tree = Conversations()
    assert tree.find([HI], []) is None
    assert tree.add([HI], [], YES, None, torch.tensor([1, 2])) == [HI]
    first = tree.find([HI, YES, BYE], [])
    assert first is not None
    assert (first.messages, first.all_ids(), first.length) == ((HI, YES), [1, 2], 2)
    assert tree.add([HI, YES, BYE], [], NO, first, torch.tensor([3])) == [BYE]
    second = tree.find([HI, YES, BYE, NO, HI], [])
    assert second is not None
    assert (second.messages, second.all_ids(), second.length) == ((HI, YES, BYE, NO), [1, 2, 3], 3)
    assert tree.find([HI, YES, HI], []) is first
    for other in ([HI, NO, BYE], [BYE, YES], [HI], [{**HI, "role": "system"}, YES]):
        assert tree.find(other, []) is None
    tool: Any = {"type": "function", "function": {"name": "f", "description": "", "parameters": {}}}
    assert tree.find([HI, YES], [tool]) is None  # its prompt has other tokens


def test_a_call_is_part_of_a_message_and_reasoning_is_not() -> None:
    call: Any = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asked = {**YES, "tool_calls": [call], "reasoning_content": "so"}
    tree = Conversations()
    tree.add([HI], [], asked, None, torch.tensor([1]))
    assert tree.find([HI, YES], []) is None
    assert tree.find([HI, {**YES, "tool_calls": [{**call, "id": "2"}]}], []) is None
    found = tree.find([HI, {**YES, "tool_calls": [call]}], [])
    assert found is not None
    assert found.messages == (HI, asked)  # as it was sampled, with its reasoning
    first, second = (said("tool", "3", tool_call_id=name) for name in "12")
    tree.add([HI, asked, first], [], NO, found, torch.tensor([2]))
    assert tree.find([HI, asked, second, NO], []) is found  # the answer to another call


class Bridge:
    def __init__(self) -> None:
        self._numbers = count()

    def begin(self) -> str:
        return f"session {next(self._numbers)}"


def shared() -> Session:
    return shared_session(Bridge(), "a-token-of-enough-characters")  # type: ignore[arg-type]


def turn(session: Session, messages: list[Message], answer: Message) -> str:
    """The engine session that answers `messages`, to which the answer is then added."""
    assert session.engine_sessions is not None
    name = session.engine_session_of(TurnRequest(tuple(messages)))
    session.engine_sessions.answered(messages, (), answer, name)
    messages.append(answer)
    return name


def test_two_engines_share_the_clients_of_one_token() -> None:
    """20 conversations of two turns, one after the other: of one session, all 40 would be with the first engine."""
    session, scheduler, numbers = shared(), Scheduler(2, limit=100), count()
    lanes = [0, 0]
    conversations = [[said("user", f"I am {number}")] for number in range(20)]
    for _ in range(2):
        for messages in conversations:
            name = turn(session, messages, said("assistant", "yes"))
            messages.append(said("user", "and?"))
            sampling, ids = SamplingParams(), torch.tensor([1, 2])
            scheduler.add(GenerationRequest(str(next(numbers)), ids, 0, 5, sampling, name))
            lanes = [scheduler.in_flight(lane)[0] for lane in range(2)]
    assert lanes == [20, 20]


def test_a_conversation_keeps_its_session_and_another_one_has_its_own() -> None:
    session = shared()
    first, second = [said("user", "hi")], [said("user", "hi")]  # which begin alike
    names = [turn(session, first, said("assistant", "a")), turn(session, second, said("assistant", "b"))]
    assert len(set(names)) == 2
    for messages, name in zip((first, second), names, strict=True):
        messages.append(said("user", "go on"))
        assert turn(session, messages, said("assistant", "c", reasoning_content="so")) == name
        back = [*messages[:-1], said("assistant", "c"), said("user", "end")]  # without its reasoning
        assert turn(session, back, said("assistant", "d")) == name
    assert turn(session, [said("user", "hi")], said("assistant", "a")) not in names
    unknown = [said("user", "hi"), said("assistant", "never said"), said("user", "x")]
    assert turn(session, unknown, said("assistant", "e")) not in names


def test_the_sessions_of_conversations_continued_last_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conversations, "MOST_ANSWERS", 2)
    numbers = count()
    sessions = EngineSessions(lambda: str(next(numbers)))
    yes = said("assistant", "yes")
    for word in "abc":
        asked = [said("user", word)]
        sessions.answered(asked, (), yes, sessions.of(asked, ()))
    assert [sessions.of([said("user", word), yes], ()) for word in "abc"] == ["3", "1", "2"]


def test_an_agent_has_one_session_for_all_its_turns() -> None:
    session = Session("engine")
    assert {session.engine_session_of(TurnRequest((said("user", text),))) for text in "ab"} == {"engine"}
