"""The Responses API with OpenAI's client, and completions of text and token ids, which a scripted completer gives."""

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


async def complete(served: Any, **body: Any) -> Any:
    return await served.send("/completions", body)


def ids(served: Any, text: str) -> list[int]:
    return list(served.completer.tokenizer(text)["input_ids"])


async def test_prompts_are_texts_or_token_ids_and_not_rendered(served: Any) -> None:
    for prompt in ("ab", ["ab"], ids(served, "ab"), [ids(served, "ab")]):
        (choice,) = (await complete(served, prompt=prompt, max_tokens=3)).json()["choices"]
        assert choice == {"index": 0, "text": "hel", "logprobs": None, "finish_reason": "length"}
    assert [asked[0] for asked in served.completer.asked] == [ids(served, "ab")] * 4
    assert len({asked[1] for asked in served.completer.asked}) == 4  # seeds: an attempt's tries differ


async def test_the_completions_of_several_prompts_are_in_order_and_recorded(serving: Any) -> None:
    async with serving(max_turns=4) as served:
        reply = (await complete(served, prompt=["ab", "c"], n=2, stop="lo", echo=True, logprobs=None)).json()
        assert [(one["index"], one["text"], one["finish_reason"]) for one in reply["choices"]] == [
            (0, "abhel", "stop"), (1, "abhel", "stop"), (2, "chel", "stop"), (3, "chel", "stop"),
        ]  # fmt: skip
        assert reply["usage"] == {"prompt_tokens": 3, "completion_tokens": 4 * 5, "total_tokens": 23}
        rows = served.session.trajectory.rows
        assert sorted(row.token_ids.tolist() for row in rows) == sorted(
            [ids(served, "abhello")] * 2 + [ids(served, "chello")] * 2
        )
        assert [int(row.token_mask.sum()) for row in rows] == [5] * 4
        assert sorted((turn["content"], turn["trained"]) for turn in served.session.transcript) == sorted(
            [("ab", False), ("hel", True)] * 2 + [("c", False), ("hel", True)] * 2
        )
        refused = await complete(served, prompt="ab")
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "max_turns")


async def test_without_a_scorer_only_sampled_tokens_have_log_probabilities(served: Any) -> None:
    reply = (await complete(served, prompt="ab", max_tokens=2, logprobs=0)).json()
    assert reply["choices"][0]["logprobs"] == {
        "tokens": ["h", "e"],
        "token_logprobs": [-1.0, -2.0],
        "top_logprobs": [{"h": -1.0}, {"e": -2.0}],
        "text_offset": [0, 1],
    }
    for wrong in ({"logprobs": 1}, {"logprobs": 0, "echo": True}):
        assert "worker_group.name=inline" in (await complete(served, prompt="ab", **wrong)).text
    assert len(served.completer.asked) == 1


class Scorer:
    """Gives the token at position p the log-probability -p, and token 5 as the most likely, at -0.5."""

    async def score(self, ids: list[int], top: int) -> list[dict[int, float] | None]:
        best = {5: -0.5} if top else {}
        return [None, *({token: -float(place), **best} for place, token in enumerate(ids[1:], 1))]


async def test_log_probabilities_of_prompt_and_completion(served: Any) -> None:
    served.endpoint._scorer = Scorer()
    best = served.completer.tokenizer.decode([5])
    echoed = (await complete(served, prompt="ab", max_tokens=1, logprobs=1, echo=True)).json()["choices"][0]
    assert echoed["logprobs"] == {
        "tokens": ["a", "b", "h"],
        "token_logprobs": [None, -1.0, -2.0],
        "top_logprobs": [None, {"b": -1.0, best: -0.5}, {"h": -2.0, best: -0.5}],
        "text_offset": [0, 1, 2],
    }
    alone = (await complete(served, prompt="ab", max_tokens=1, logprobs=1)).json()["choices"][0]
    assert alone["logprobs"]["top_logprobs"] == [{"h": -2.0, best: -0.5}]
    assert len(served.completer.asked) == 2
    scored = (await complete(served, prompt="ab", max_tokens=0, logprobs=0, echo=True)).json()["choices"][0]
    assert (scored["text"], scored["logprobs"]["token_logprobs"]) == ("ab", [None, -1.0])
    assert len(served.completer.asked) == 2  # nothing more was sampled


def test_tokens_with_the_same_text_have_the_larger_log_probability() -> None:
    """Else a client would take a token for the most likely one that is not."""
    from rlframework_serve.completions import _by_text

    texts = {1: "\ufffd", 2: "\ufffd"}
    assert _by_text({1: -3.0, 2: -1.0}, texts) == _by_text({2: -1.0, 1: -3.0}, texts) == {"\ufffd": -1.0}


@pytest.mark.parametrize("options", [{}, {"stream_options": {"include_usage": True}}])
async def test_completions_are_streamed_to_the_openai_client(client: Any, options: Any) -> None:
    asked = {"model": "policy", "prompt": ["a", "b"], "stream": True, **options}
    events = [event async for event in await client.completions.create(**asked)]
    choices = [[(one.index, one.text, one.finish_reason) for one in event.choices] for event in events]
    assert choices[:2] == [[(0, "hello", "stop")], [(1, "hello", "stop")]]
    used = [(event.choices, event.usage.total_tokens) for event in events[2:]]
    assert used == ([([], 2 + 2 * 6)] if options else [])


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "prompt must be a list of token ids"),
        ({"prompt": []}, "prompt must be"),
        ({"prompt": ["a", 1]}, "prompt must be"),
        ({"prompt": ""}, "prompt 0 has no tokens"),
        ({"prompt": "a", "max_tokens": 0}, "needs echo=true"),
        ({"prompt": "a", "echo": "yes"}, "must be true or false"),
        ({"prompt": "a", "temperature": 0.5}, "agent_sampling"),
        ({"prompt": "a", "best_of": 2}, "best_of: not served"),
        ({"prompt": "a", "logit_bias": {"1": 5}}, "logit_bias"),
        ({"prompt": ["a"] * 17, "n": 64}, "are 1088; the most is 1024"),
        ({"prompt": "a" * 3000}, "leaves no room for a turn"),
    ],
)
async def test_what_is_not_served_is_rejected(served: Any, body: dict[str, Any], problem: str) -> None:
    reply = await complete(served, **body)
    assert reply.status_code == 400
    assert problem in reply.json()["error"]["message"]
    assert not served.completer.asked


async def test_health_needs_no_token(served: Any) -> None:
    served.session.token = "wrong"
    served.base_url = served.base_url.removesuffix("/v1")
    found = await served.send("/health", None, "GET")
    assert (found.status_code, found.json()) == (200, {"status": "ok"})
    assert (await served.send("/health", None, "HEAD")).status_code == 200
    assert (await served.send("/health", None)).status_code == 401
    assert (await served.send("/v1/health", None, "GET")).status_code == 401
