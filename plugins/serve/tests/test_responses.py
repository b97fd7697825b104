"""The Responses API, with OpenAI's client."""

from __future__ import annotations

from typing import Any

import pytest

TOOL = {"type": "function", "name": "add", "description": "Add.", "parameters": {"type": "object", "properties": {}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


@pytest.mark.slow
async def test_function_calls_are_answered_and_the_row_grows(served: Any, client: Any) -> None:
    served.completer.answers = [CALL, "2"]
    first = await client.responses.create(model="policy", instructions="Add.", input="1+1", tools=[TOOL])
    (call,) = first.output
    assert (call.type, call.name, call.arguments) == ("function_call", "add", '{"a": 1}')
    assert served.session.calls == 1
    items = [
        {"role": "user", "content": "1+1"},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "2"},
    ]
    second = await client.responses.create(model="policy", instructions="Add.", input=items, tools=[TOOL])
    assert (second.output_text, second.status) == ("2", "completed")
    roles = [turn["role"] for turn in served.session.transcript]
    assert roles == ["system", "user", "assistant", "tool", "assistant"]
    assert len(served.session.trajectory.rows) == 1
    again = await client.responses.create(
        model="policy", instructions="Add.", previous_response_id=second.id, input="more", tools=[TOOL]
    )
    assert again.usage.input_tokens == len(served.completer.asked[2][0])


@pytest.mark.slow
async def test_the_last_responses_are_kept(served: Any, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlframework_serve.sessions.MOST_RESPONSES", 2)

    from openai import BadRequestError

    ids = [(await client.responses.create(model="policy", input="hi")).id for _ in range(3)]
    with pytest.raises(BadRequestError, match="the last 2 of a session are kept"):
        await client.responses.create(model="policy", input="more", previous_response_id=ids[0])
    await client.responses.create(model="policy", input="more", previous_response_id=ids[1])
    assert len(served.completer.asked[3][0]) > len(served.completer.asked[1][0])


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["hello", CALL])
async def test_a_stream_has_the_events_of_each_item(served: Any, client: Any, answer: str) -> None:
    served.completer.answers = [answer]
    async with client.responses.stream(model="policy", input="hi", tools=[TOOL]) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_response()
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert kinds[-2:] == ["response.output_item.done", "response.completed"]
    if answer == "hello":
        assert final.output_text == "hello"
        assert "response.output_text.delta" in kinds
    else:
        assert final.output[0].arguments == '{"a": 1}'
        assert "response.function_call_arguments.delta" in kinds


async def test_a_turn_that_is_cut_off_is_incomplete(client: Any) -> None:
    reply = await client.responses.create(model="policy", input="hi", max_output_tokens=2)
    assert (reply.status, reply.incomplete_details.reason) == ("incomplete", "max_output_tokens")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"input": [{"type": "computer_call"}]}, "has the type 'computer_call'"),
        ({"input": 3}, "input must be a text"),
        ({"previous_response_id": "resp_x"}, "is not a response of this session"),
        ({"text": {"format": {"type": "json_schema"}}}, "output is not constrained"),
        ({"truncation": "auto"}, "conversations are not shortened"),
        ({"background": True}, "background: not served"),
        ({"temperature": 0.0}, "temperature=0"),
    ],
)
async def test_what_is_not_served_is_rejected_by_name(client: Any, body: dict[str, Any], message: str) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError) as error:
        await client.responses.create(model="policy", input="hi", extra_body=body)
    assert message in error.value.body["message"]
