"""Rows in the usual shapes, and what is said of others."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from rlframework.base.errors import DataError
from rlframework.config.environments import ColumnsConfig
from rlframework.datasets.conversations import Conversation, conversation_of, number_text
from rlframework.interfaces.messages import Message

NAN = float("nan")
SYSTEM: Message = {"role": "system", "content": "be brief"}
HI: Message = {"role": "user", "content": "hi"}
HELLO: Message = {"role": "assistant", "content": "hello"}
SUM: Message = {"role": "user", "content": "2+2?"}


def read(row: dict[str, Any], **columns: str) -> Conversation:
    return conversation_of(row, ColumnsConfig(**columns), "a.jsonl, line 3")


def calling(arguments: object) -> dict[str, object]:
    """An assistant turn that calls `f`."""
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "function": {"name": "f", "arguments": arguments}}],
    }


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": [SYSTEM, HI, HELLO]}, Conversation((SYSTEM, HI), "hello")),
        ({"messages": [HI, HELLO, SUM, {"role": "assistant", "content": "4"}]}, Conversation((HI, HELLO, SUM), "4")),
        ({"messages": [HI, HELLO, SUM]}, Conversation((HI, HELLO, SUM))),
        ({"messages": [HI], "answer": "hello"}, Conversation((HI,), "", "hello")),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
            Conversation((HI,), "hello"),
        ),
        ({"conversations": [{"role": "User", "content": "hi"}, HELLO]}, Conversation((HI,), "hello")),
        ({"prompt": "hi", "completion": "hello"}, Conversation((HI,), "hello")),
        ({"prompt": "2+2?", "completion": "It is 4", "answer": 4}, Conversation((SUM,), "It is 4", "4")),
        ({"prompt": "2+2?", "answer": 4.5}, Conversation((SUM,), "4.5", "4.5")),
        ({"prompt": [SYSTEM, HI], "completion": "hello"}, Conversation((SYSTEM, HI), "hello")),
        ({"prompt": [HI], "completion": [HELLO]}, Conversation((HI,), "hello")),
        ({"prompt": [HI]}, Conversation((HI,))),
        ({"question": "2+2?", "answer": "4"}, Conversation((SUM,), "4", "4")),
        ({"question": "2+2?"}, Conversation((SUM,))),
        # verl's layout; an empty answer of its own is not filled
        ({"prompt": [SUM], "reward_model": {"ground_truth": "4"}}, Conversation((SUM,), "", "4")),
        ({"prompt": [SUM], "reward_model": {"ground_truth": ["4"]}}, Conversation((SUM,), "", '["4"]')),
        ({"prompt": [SUM], "reward_model": None}, Conversation((SUM,))),
        ({"prompt": [SUM], "answer": None, "reward_model": {"ground_truth": "4"}}, Conversation((SUM,))),
        # numbers as people write them; not a number is no value
        ({"question": "2+2?", "answer": 4.0}, Conversation((SUM,), "4", "4")),
        ({"question": "2+2?", "answer": Decimal("4.50")}, Conversation((SUM,), "4.50", "4.50")),
        ({"question": "2+2?", "answer": NAN}, Conversation((SUM,))),
        ({"prompt": "2+2?", "completion": NAN, "answer": "4"}, Conversation((SUM,), "4", "4")),
        ({"prompt": NAN, "text": "once upon"}, Conversation((), "once upon")),
        ({"messages": [{**HI, "value": NAN, "name": NAN}]}, Conversation((HI,))),
        ({"text": "once upon"}, Conversation((), "once upon")),
        # several shapes at once, and columns without a value, as Arrow has them
        ({"prompt": "hi", "messages": [HI, HELLO], "text": "x"}, Conversation((HI,), "hello")),
        ({"messages": None, "prompt": None, "question": "hi", "answer": None, "id": 7}, Conversation((HI,))),
        (
            {"messages": [{**HI, "tool_calls": None, "name": None}, {**HELLO, "tool_calls": []}]},
            Conversation((HI,), "hello"),
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]}]},
            Conversation((HI,)),
        ),
    ],
)
def test_the_usual_shapes(row, expected) -> None:
    assert read(row) == expected


def test_columns_of_other_names_come_first() -> None:
    row = {"messages": [HI], "instruction": "2+2?", "output": "4", "gold": "four"}
    assert read(row, prompt="instruction", completion="output") == Conversation((SUM,), "4")
    assert read(row, question="instruction", answer="gold") == Conversation((SUM,), "four", "four")
    assert read({"messages": [HI], "body": "once"}, text="body") == Conversation((), "once")
    assert read({"dialog": [HI, HELLO], "text": "x"}, messages="dialog") == Conversation((HI,), "hello")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"a": 1, "b": 2}, r"no conversation in the columns \['a', 'b'\].*one of \['messages', .*environment\.columns"),
        ({"prompt": None}, "the column 'prompt' has no value"),
        ({}, r"no conversation in the columns \[\]"),
        ({"messages": "hi"}, "column 'messages': must be a list of messages, not str"),
        ({"messages": []}, "column 'messages': must be a list of messages, not an empty list"),
        ({"messages": [HI, "hello"]}, "turn 2: must be an object with 'role' and 'content', not str"),
        ({"messages": [HI, {"role": "assistant"}]}, r"turn 2: needs 'role' and 'content'.*it has \['role'\]"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "turn 1: unknown role 'robot'; .*'assistant'"),
        ({"messages": [{"role": 1, "content": "x"}]}, "unknown role 1"),
        ({"messages": [HI, {"role": "assistant", "content": ""}]}, "the last assistant turn is empty"),
        ({"messages": [{"role": "user", "content": 5}]}, "the content must be text, not int"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"of type \['image'\] are not supported"),
        ({"messages": [HI, {**HELLO, "tool_calls": [{}]}]}, "turn 2, tool call 1: must name a function"),
        ({"messages": [HI, calling('{"a": ')]}, "turn 2, tool call 1, arguments: is not JSON"),
        ({"messages": [HI, calling("[1]")]}, r"turn 2, tool call 1: the arguments must be a JSON object, not \[1\]"),
        ({"messages": [{**calling("{}"), "role": "user"}]}, "only assistant turns have tool calls and reasoning"),
        ({"messages": [HI, {"role": "tool", "content": "1", "tool_call_id": 5}]}, "tool_call_id must be text, not int"),
        ({"messages": [HI, HELLO], "tools": "{"}, "column 'tools': is not JSON"),
        ({"messages": [HI, HELLO], "tools": {"name": "f"}}, "column 'tools': must be a list of tools, or one as JSON"),
        ({"messages": [HI, HELLO], "tools": [{"type": "function"}]}, "tool 1: must be an object with the name of a"),
        ({"prompt": {"text": "hi"}}, "column 'prompt': must be text or a number, not dict"),
        ({"prompt": "hi", "completion": True}, "column 'completion': must be text or a number, not bool"),
        ({"question": "hi", "answer": ["a"]}, "must be a"),
        ({"text": ""}, "the text is empty"),
        ({"text": NAN}, "the column 'text' has no value"),
        ({"question": "hi", "answer": float("-inf")}, "column 'answer': must be text or a number, not -inf"),
        ({"messages": [{"role": "user", "content": NAN}]}, "turn 1: its 'content' is null"),
        ({"messages": [{"role": "user"}]}, r"turn 1: needs 'role' and 'content'.*it has \['role'\]"),
        ({"messages": [HI, {**HELLO, "content": "a\ud83d"}]}, r"turn 2: the text has a lone surrogate \(\\ud83d\)"),
        ({"prompt": "hi", "completion": "\udc00"}, r"column 'completion': the text has a lone surrogate \(\\udc00\)"),
        ({"question": "hi", "answer": "\udc00"}, r"column 'answer': the text has a lone surrogate"),
        ({"text": "\udc00"}, "column 'text': the text has a lone surrogate"),
        ({"text": 5}, "column 'text': the content must be text, not int"),
    ],
)
def test_what_is_no_conversation(row, message) -> None:
    with pytest.raises(DataError, match=rf"^a\.jsonl, line 3.*{message}"):
        read(row)


def test_a_renamed_column_must_be_there() -> None:
    with pytest.raises(DataError, match=r"there is no column 'gold'; the columns are \['answer', 'question'\]"):
        read({"question": "q", "answer": "a"}, answer="gold")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (4, "4"),
        (4.0, "4"),
        (-0.0, "0"),
        (4.5, "4.5"),
        (2.0**52, "4503599627370496"),
        (1e300, "1e+300"),
        (Decimal("1.50"), "1.50"),
        (Decimal("3.00"), "3"),
        (Decimal("1E+2"), "100"),
        (Decimal("1E-7"), "0.0000001"),
        (10**30, "1" + "0" * 30),
        (10**400, "1" + "0" * 400),
        (True, None),
        ("4", None),
        (float("inf"), None),
        (Decimal("-Infinity"), None),
        (float("nan"), None),
    ],
)
def test_numbers(value: Any, text: str | None) -> None:
    assert number_text(value) == text


F_CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1, "y": null}'}}
F_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}


@pytest.mark.parametrize("tools", [[F_TOOL], [F_TOOL["function"]], json.dumps([F_TOOL])])
def test_calls_and_tools_are_kept(tools) -> None:
    """A call's arguments are JSON text; nulls in it are the model's own, those of a table are absent keys."""
    answer = {"role": "tool", "content": "5", "tool_call_id": "a", "name": "f", "reasoning_content": None}
    row = {"messages": [HI, calling('{"x": 1, "y": null}'), answer, HELLO], "tools": tools}
    found = conversation_of(row, ColumnsConfig(), "a")
    assert found.messages == (
        HI,
        {"role": "assistant", "content": "", "tool_calls": [F_CALL]},
        {"role": "tool", "content": "5", "tool_call_id": "a", "name": "f"},
    )
    assert found.completion == "hello"
    assert found.tools == (F_TOOL,)


@pytest.mark.parametrize(
    "turn",
    [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1, "y": None}}}],
        },
        {"role": "assistant", "function_call": {"name": "f", "arguments": '{"x": 1}'}},
    ],
)
def test_a_row_may_end_with_a_call(turn) -> None:
    """As a mapping, and in the older form."""
    found = conversation_of({"messages": [HI, turn]}, ColumnsConfig(), "a")
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert found.messages[1] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert (found.completion, found.tools) == ("", ())


def test_dotted_columns_are_read_inside_of_others() -> None:
    """A column of that exact name comes first; a key that is missing is named with its row."""
    row = {"input": {"text": "2+2?"}, "meta": {"gold": {"value": 4}}}
    assert read(row, prompt="input.text", answer="meta.gold.value") == Conversation((SUM,), "4", "4")
    assert read(row | {"input.text": "hi"}, prompt="input.text").messages == (HI,)
    assert read(row | {"meta": None}, prompt="input.text", answer="meta.gold.value").answer is None
    with pytest.raises(
        DataError, match=r"a\.jsonl, line 3: the column 'meta\.gold' has no 'text'; its keys are \['value'\]"
    ):
        read(row, prompt="input.text", answer="meta.gold.text")
    with pytest.raises(DataError, match=r"line 3: the column 'input\.text' has no 'x'; it is str"):
        read(row, prompt="input.text.x")
    with pytest.raises(DataError, match=r"line 3: there is no column 'other\.text'; the columns are"):
        read(row, prompt="other.text")
