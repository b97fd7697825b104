"""Chat completions, with OpenAI's client."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.slow

HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": {"type": "object"}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


async def test_a_reply_has_text_usage_logprobs_and_is_recorded(served: Any, client: Any) -> None:
    reply = await client.chat.completions.create(model="policy", messages=HI, logprobs=True, max_tokens=3)
    choice = reply.choices[0]
    assert (choice.message.content, choice.finish_reason) == ("hel", "length")
    assert [(t.token, t.logprob) for t in choice.logprobs.content] == [("h", -1.0), ("e", -2.0), ("l", -3.0)]
    prompt = served.completer.asked[0][0]
    assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (len(prompt), 3)
    (row,) = served.session.trajectory.rows
    assert row.token_ids.tolist()[: len(prompt)] == prompt
    assert row.token_mask.tolist() == [False] * len(prompt) + [True] * 3
    assert served.session.limit == "agent_request"
    assert [m.id async for m in client.models.list()] == ["policy"]


async def test_a_conversation_goes_on_with_the_sampled_tokens(served: Any, client: Any) -> None:
    first = await client.chat.completions.create(model="policy", messages=HI)
    message = first.choices[0].message.model_dump(exclude_none=True)
    more = [*HI, message, {"role": "user", "content": "more"}]
    await client.chat.completions.create(model="policy", messages=more)
    row = served.session.trajectory.rows[0]
    assert len(served.session.trajectory.rows) == 1
    assert row.token_mask.sum() == 2 * len("hello!")  # `!` for the end token
    first_prompt, second_prompt = served.completer.asked[0][0], served.completer.asked[1][0]
    end = served.completer.tokenizer.eos_token_id
    assert second_prompt[: len(first_prompt) + 6] == [*first_prompt, *_ids(served, "hello"), end]
    assert [turn["role"] for turn in served.session.transcript] == ["user", "assistant"] * 2
    await client.chat.completions.create(model="policy", messages=[*more, message, *more[-1:]])
    assert served.completer.asked[2][0][: len(row.token_ids)] == row.token_ids.tolist()
    assert len(served.session.trajectory.rows) == 1
    other = [*HI, {**message, "content": "other"}, {"role": "user", "content": "more"}]
    await client.chat.completions.create(model="policy", messages=other)
    assert len(served.session.trajectory.rows) == 2


def _ids(served: Any, text: str) -> list[int]:
    ids: list[int] = served.completer.tokenizer(text, add_special_tokens=False)["input_ids"]
    return ids


async def test_choices_are_sampled_with_different_seeds_after_one_prompt(served: Any, client: Any) -> None:
    served.completer.answers = ["a", "b"]
    reply = await client.chat.completions.create(model="policy", messages=HI, n=2, seed=9)
    assert [(choice.index, choice.message.content) for choice in reply.choices] == [(0, "a"), (1, "b")]
    await client.chat.completions.create(model="policy", messages=HI, seed=9)
    seeds = [asked[1] for asked in served.completer.asked]
    assert len(set(seeds)) == 3
    assert reply.usage.completion_tokens == 4
    rows = served.session.trajectory.rows
    sampled = [row.token_ids[row.token_mask].tolist() for row in rows]
    end = served.completer.tokenizer.eos_token_id
    assert sampled == [[*_ids(served, text), end] for text in "aba"]  # no choice is lost, and none twice


async def test_the_events_of_a_stream_name_their_choices(served: Any, client: Any) -> None:
    served.completer.answers = ["a", "bc"]
    texts, reasons, logprobs = {0: "", 1: ""}, dict[int, str](), dict[int, list[tuple[str, float]]]()
    options = {"n": 2, "stream": True, "logprobs": True, "max_tokens": 2}
    async for chunk in await client.chat.completions.create(model="policy", messages=HI, **options):
        for choice in chunk.choices:
            assert choice.index not in reasons  # nothing follows the event with the reason
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                reasons[choice.index] = choice.finish_reason
            if choice.logprobs:
                logprobs[choice.index] = [(part.token, part.logprob) for part in choice.logprobs.content]
    assert (texts, reasons) == ({0: "a", 1: "bc"}, {0: "stop", 1: "length"})
    end = served.completer.tokenizer.eos_token
    assert logprobs == {0: [("a", -1.0), (end, -2.0)], 1: [("b", -1.0), ("c", -2.0)]}


async def test_calls_that_no_tool_can_take_are_counted(served: Any, client: Any) -> None:
    served.completer.answers = [CALL, CALL.replace("add", "subtract")]
    for _ in range(2):
        await client.chat.completions.create(model="policy", messages=HI, tools=[TOOL])
    assert (served.session.calls, served.session.malformed) == (2, 1)


async def test_seeds_depend_on_the_session_and_the_prompt_and_not_on_the_order_of_requests(serving: Any) -> None:
    async def seeds(order: str, seed: int, asked: int | None = None) -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        async with serving(seed=seed) as served, served.client() as client:
            for text in order:
                messages = [{"role": "user", "content": text}]
                await client.chat.completions.create(model="policy", messages=messages, seed=asked)
                found.setdefault(text, []).append(served.completer.asked[-1][1])
        return found

    first = await seeds("aab", 5)
    assert len({*first["a"], *first["b"]}) == 3
    assert await seeds("aba", 5) == await seeds("baa", 5, asked=9) == first  # the agent's seed is not used
    other = await seeds("aab", 6)
    assert not {*other["a"], *other["b"]} & {*first["a"], *first["b"]}


async def test_clients_choose_temperatures_where_nothing_is_trained(serving: Any) -> None:
    async with serving("allow", seed=None, record=False) as served, served.client() as client:
        options = {"model": "policy", "messages": HI, "seed": 9, "temperature": 0.5, "top_p": 0.5}
        await client.chat.completions.create(**options)
        _, seed, _, sampling = served.completer.asked[0]
        assert (seed, sampling.temperature, sampling.top_p) == (9, 0.5, 0.5)
        assert (served.session.trajectory.turns, served.session.transcript) == (0, [])
        await client.chat.completions.create(**options | {"seed": -(2**63), "n": 2})
        first, second = (asked[1] for asked in served.completer.asked[1:])
        assert 0 <= first < 2**62 > second >= 0
        assert first != second


@pytest.mark.parametrize("foreign", ["reject", "override"])
async def test_another_temperature_than_the_runs(serving: Any, foreign: str) -> None:
    from openai import BadRequestError

    async with serving(foreign) as served, served.client() as client:
        create = client.chat.completions.create
        await create(model="policy", messages=HI, temperature=1.0, top_p=1.0)
        if foreign == "override":
            await create(model="policy", messages=HI, temperature=0.0)
            assert served.completer.asked[1][3].temperature == 1.0
            return
        for stream in (False, True):
            with pytest.raises(BadRequestError, match=r"temperature=0: .* temperature=1 and top_p=1"):
                await create(model="policy", messages=HI, temperature=0.0, stream=stream)
        assert len(served.completer.asked) == 1


async def test_text_before_a_stop_is_returned_and_the_tokens_up_to_it_are_recorded(served: Any, client: Any) -> None:
    served.completer.answers = ["one, two, three"]
    reply = await client.chat.completions.create(model="policy", messages=HI, stop=[" th", ", t"])
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("one", "stop")
    (row,) = served.session.trajectory.rows
    sampled = row.token_ids[row.token_mask].tolist()
    assert sampled == _ids(served, "one, t")
    assert row.logprobs[row.token_mask].tolist() == [-1.0, -2.0, -3.0, -4.0, -5.0, -6.0]
    assert [end - start for start, end, _ in row.spans] == [6]


async def test_a_stream_has_the_same_reply(served: Any, client: Any) -> None:
    served.completer.answers = [f"now {CALL}"]
    text, calls, reasons, used = "", [], [], None
    options = {"tools": [TOOL], "stream": True, "stream_options": {"include_usage": True}}
    async for chunk in await client.chat.completions.create(model="policy", messages=HI, **options):
        used = chunk.usage or used
        for choice in chunk.choices:
            text += choice.delta.content or ""
            calls += choice.delta.tool_calls or []
            reasons.append(choice.finish_reason)
    assert text.strip() == "now"
    assert [(call.index, call.function.name, call.function.arguments) for call in calls] == [(0, "add", '{"a": 1}')]
    assert reasons[-1] == "tool_calls"
    assert used is not None
    assert used.completion_tokens == len(f"now {CALL}!")


@pytest.mark.parametrize("options", [{}, {"tools": [TOOL], "tool_choice": "none"}])
async def test_without_tools_a_call_is_content(served: Any, client: Any, options: Any) -> None:
    served.completer.answers = [f"now {CALL}"]
    choice = (await client.chat.completions.create(model="policy", messages=HI, **options)).choices[0]
    assert (choice.message.content, choice.finish_reason) == (f"now {CALL}", "stop")
    assert choice.message.tool_calls is None
    assert served.session.calls == 0
    reply = await client.responses.create(model="policy", input="hi", **options)
    assert (reply.output_text, len(reply.output)) == (f"now {CALL}", 1)


@pytest.mark.parametrize(
    ("most", "reason", "calls"),
    [(len(CALL) + 2, "tool_calls", 1), (len(CALL), "tool_calls", 1), (len(CALL) - 20, "length", 1), (3, "length", 0)],
)
async def test_a_cut_turn_has_the_reason_of_what_was_sent(
    served: Any, client: Any, most: int, reason: str, calls: int
) -> None:
    """A whole call is called; a part of one, and text, are not complete."""

    served.completer.answers = [f"{CALL} and so on"]
    options = {"model": "policy", "messages": HI, "tools": [TOOL], "max_tokens": most}
    choice = (await client.chat.completions.create(**options)).choices[0]
    assert (choice.finish_reason, len(choice.message.tool_calls or ())) == (reason, calls)
    found = [chunk.choices[0] async for chunk in await client.chat.completions.create(**options, stream=True)]
    assert [each.finish_reason for each in found if each.finish_reason] == [reason]
    assert sum(len(each.delta.tool_calls or ()) for each in found) == calls
    assert served.session.limit == "agent_request"


async def test_ids_of_the_same_call_in_two_turns_differ(served: Any, client: Any) -> None:
    served.completer.answers = [CALL]
    messages, ids = list[Any](HI), list[str]()
    for _ in range(3):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        message = reply.choices[0].message.model_dump(exclude_none=True)
        ids.append(message["tool_calls"][0]["id"])
        messages += [message, {"role": "tool", "content": "3", "tool_call_id": ids[-1]}]
    assert len(set(ids)) == 3
    assert len(served.session.trajectory.rows) == 1


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "robot", "content": "a"}]}, "system, developer, user"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "serves text only"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "tool_call_id"),
        ({"n": 65}, "n=65 must be an integer from 1 to 64"),
        ({"n": True}, "n=True must be an integer"),
        ({"max_tokens": 0}, "max_tokens=0 must be"),
        ({"temperature": "hot"}, "temperature='hot' must be a number"),
        ({"frequency_penalty": 1}, "frequency_penalty=1 changes the sampling"),
        ({"logit_bias": {"1": 5}}, "logit_bias changes the sampling"),
        ({"top_logprobs": 3}, "top_logprobs=3"),
        ({"tool_choice": "required"}, "not forced to call tools"),
        ({"tools": [{"type": "web_search"}]}, "a tool has the type function"),
        ({"tools": [TOOL, TOOL]}, "different names"),
        ({"response_format": {"type": "json_object"}}, "output is not constrained"),
        ({"stop": [""]}, "stop must be"),
        ({"do_magic": 1}, "do_magic: not served"),
    ],
)
async def test_what_is_not_served_is_rejected_by_name(
    served: Any, client: Any, body: dict[str, Any], message: str
) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError) as error:
        await client.chat.completions.create(model="policy", messages=HI, extra_body=body)
    assert message in error.value.body["message"]
    assert not served.completer.asked
