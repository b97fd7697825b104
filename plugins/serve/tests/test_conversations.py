"""The tree of a session's conversations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlframework.interfaces.messages import Message
from rlframework_serve.conversations import Conversations


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


@pytest.mark.thorough
def test_a_long_conversation_keeps_each_message_and_token_once() -> None:
    """2,000 turns: with the tokens of each turn's whole conversation it would be 2e6 of them."""
    tree, messages, turn = Conversations(), [], None
    for number in range(2000):
        messages.append(said("user", str(number)))
        new = tree.add(messages, [], YES, turn, torch.tensor([number]))
        assert new == messages[-1:]
        messages.append(YES)
        turn = tree.find(messages, [])
        assert turn is not None
        assert len(turn.ids) == 1
    assert turn.all_ids() == list(range(2000))
    assert turn.length == 2000
