"""Clients that have no token, send too much or nonsense, never end, or go away."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest

EVENTS = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.mkdir",
    "os.rename",
    "os.symlink",
    "subprocess.Popen",
    "pickle.find_class",
)
HI = [{"role": "user", "content": "hi"}]
BODY = {"model": "policy", "messages": HI}


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/models", "/sessions/a/reward", "/nothing", "/"])
@pytest.mark.parametrize("authorization", ["", "Bearer", "Bearer wrong", "Basic TOKEN", "Bearer TOKENx", "TOKEN"])
async def test_a_wrong_token_gets_401_and_nothing_else(served: Any, path: str, authorization: str) -> None:
    sent = authorization.replace("TOKEN", served.session.token)
    reply = await served.send(path, BODY, Authorization=sent)
    assert reply.status_code == 401
    assert reply.json() == {
        "error": {
            "message": "invalid bearer token",
            "type": "invalid_request_error",
            "param": None,
            "code": "invalid_api_key",
        }
    }
    assert "server" not in reply.headers
    assert not served.completer.asked


@pytest.mark.slow
async def test_a_body_that_is_too_large_is_rejected_before_it_is_read(serving: Any) -> None:
    async with serving(max_body=1000) as served:
        fits = json.dumps(BODY).ljust(1000)
        assert (await served.send("/chat/completions", fits)).status_code == 200
        assert (await served.send("/chat/completions", fits + " ")).status_code == 413

        async def parts() -> Any:
            for _ in range(11):
                yield b" " * 100

        assert (await served.send("/chat/completions", parts())).status_code == 413  # without a length
        reader, writer = await asyncio.open_connection(*served.address())
        head = f"POST /v1/responses HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {served.session.token}\r\n"
        writer.write(f"{head}Content-Length: 1000000000\r\n\r\n".encode())
        assert b" 413 " in await asyncio.wait_for(reader.readline(), 60)  # although nothing was sent
        writer.close()


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"nul", b'{"n": NaN}', b"\xff\xfe", pytest.param(b"[" * 50_000, id="nested")]
)
@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/sessions/ID/reward"])
async def test_broken_json_is_rejected(served: Any, path: str, content: bytes) -> None:
    reply = await served.send(path.replace("ID", served.session.id), content)
    assert reply.status_code == 400
    assert "the body is not" in reply.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/chat/completions", "/responses", "/sessions/ID/reward"])
async def test_a_key_that_is_no_text_is_rejected(served: Any, path: str) -> None:
    reply = await served.send(path.replace("ID", served.session.id), '{"\\ud800": 1}')
    assert reply.status_code == 400


async def test_what_is_sent_back_may_have_lone_surrogates(served: Any) -> None:
    tools = [{"type": "function", "name": "f", "parameters": {}, "more": "\ud800"}]
    reply = await served.send("/responses", {"input": "hi", "tools": tools})
    assert (reply.status_code, reply.json()["tools"]) == (200, tools)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_aborts_its_request(served: Any, stream: bool) -> None:
    served.completer.waits = asyncio.Event()
    request = asyncio.ensure_future(served.send("/chat/completions", {**BODY, "stream": stream}))
    while not served.completer.asked:
        await asyncio.sleep(0.01)
    request.cancel()
    await asyncio.wait({request})
    async with asyncio.timeout(60):
        while not served.completer.aborted:
            await asyncio.sleep(0.01)
    assert served.completer.aborted == 1
    assert served.session.trajectory.turns == 0


@pytest.mark.parametrize("stream", [False, True])
async def test_a_closed_session_ends_its_requests(served: Any, stream: bool) -> None:
    served.completer.waits = asyncio.Event()
    request = asyncio.ensure_future(served.send("/chat/completions", {**BODY, "stream": stream}))
    while not served.completer.asked:
        await asyncio.sleep(0.01)
    served.endpoint.sessions.close(served.session)
    reply = await asyncio.wait_for(request, 60)
    assert (reply.status_code == 401) is not stream
    assert "invalid bearer token" in reply.text
    assert served.completer.aborted == 1
    assert (await served.send("/chat/completions", BODY)).status_code == 401


@pytest.mark.parametrize(
    ("path", "body"),
    [("chat/completions", BODY), ("responses", {"input": "hi"}), ("sessions/ID/reward", {"reward": 1})],
)
async def test_a_body_that_ends_after_its_session_is_not_served(served: Any, path: str, body: Any) -> None:
    """It was accepted while the session was open. Its tokens would come after the rows were taken."""

    found, find = asyncio.Event(), served.endpoint.sessions.find
    served.endpoint.sessions.find = lambda header: (found.set(), find(header))[1]
    reader, writer = await asyncio.open_connection(*served.address())
    content = json.dumps(body).encode()
    path_of = path.replace("ID", served.session.id)
    head = f"POST /v1/{path_of} HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer {served.session.token}\r\n"
    writer.write(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content[:5])
    await asyncio.wait_for(found.wait(), 60)
    served.endpoint.sessions.close(served.session)
    writer.write(content[5:])
    assert b" 401 " in await asyncio.wait_for(reader.readline(), 60)
    writer.close()
    assert not served.completer.asked
    assert served.session.reward is None


@pytest.mark.slow
async def test_a_turn_has_the_room_that_its_conversation_leaves(served: Any) -> None:
    for content, options in (("a", {"max_tokens": 10_000}), ("a" * 1800, {}), ("a" * 1800, {"max_tokens": 7})):
        said = {"messages": [{"role": "user", "content": content}], **options}
        assert (await served.send("/chat/completions", said)).status_code == 200
    (_, _, most, _), (prompt, _, left, _), (_, _, few, _) = served.completer.asked
    assert (most, left, few) == (500, 2000 - len(prompt), 7)
    assert left < 500


@pytest.mark.slow
async def test_a_session_has_a_limit_of_turns_and_of_tokens(serving: Any) -> None:
    async with serving(max_turns=2) as served:
        assert (await served.send("/chat/completions", {**BODY, "n": 3})).status_code == 400
        assert served.session.limit == "max_turns"
        assert (await served.send("/chat/completions", {**BODY, "n": 2})).status_code == 200
        reply = await served.send("/chat/completions", BODY)
        assert reply.json()["error"]["code"] == "max_turns"
        long = {"messages": [{"role": "user", "content": "a" * 2000}]}
        reply = await served.send("/chat/completions", long)
        assert reply.json()["error"]["code"] == "context_length_exceeded"


WRONG_METRICS = ('{"a": "1"}', '{"\\ud800": 1}', '{"": 1}', '{"a\\n": 1}', f'{{"{"a" * 101}": 1}}', "[1]")


@pytest.mark.slow
@pytest.mark.parametrize(
    "reward",
    ["NaN", "1e400", "9" * 400, "-" + "9" * 400, '"1"', "true", "null", "1e13",
     *(f'1, "metrics": {metrics}' for metrics in WRONG_METRICS)],
)  # fmt: skip
async def test_a_reward_that_is_no_number_is_rejected(served: Any, reward: str) -> None:
    path = f"/sessions/{served.session.id}/reward"
    assert (await served.send(path, f'{{"reward": {reward}}}')).status_code == 400
    assert served.session.reward is None
    assert (await served.send(path, '{"reward": 0.5, "metrics": {"a": 2}}')).status_code == 200
    assert (served.session.reward, served.session.metrics) == (0.5, {"a": 2.0})
    assert (await served.send(path, '{"reward": 0.75}')).status_code == 200  # the last one counts
    assert (served.session.reward, served.session.metrics) == (0.75, {})


async def test_a_token_is_good_for_its_own_session_alone(served: Any) -> None:
    from rlframework_serve.sessions import Session

    other = served.endpoint.sessions.open(Session("other", 6))
    assert (await served.send(f"/sessions/{other.id}/reward", '{"reward": 1}')).status_code == 404
    assert other.reward is None


async def test_the_endpoint_listens_on_one_address_of_loopback(served: Any) -> None:
    assert served.base_url.startswith("http://127.0.0.1:")
    with pytest.raises(OSError, match=r"127\.0\.0\.2"):  # a socket of all addresses accepts it
        await asyncio.wait_for(asyncio.open_connection("127.0.0.2", served.address()[1]), 60)


@pytest.mark.parametrize("path", ["/chat/completions", "/responses"])
@pytest.mark.parametrize(("text", "reason"), [("caf\u00e9", "no token for ['\u00e9']"), ("\ud800", "lone surrogate")])
async def test_text_that_the_tokenizer_rejects_is_named(served: Any, path: str, text: str, reason: str) -> None:
    said = {"messages": [{"role": "user", "content": text}]}
    reply = await served.send(path, json.dumps({"input": text} if path == "/responses" else said))
    assert reply.status_code == 400
    assert reason in reply.json()["error"]["message"]
    assert not served.completer.asked


@pytest.fixture
def effects() -> Iterator[list[str]]:
    """The files written, programs started and classes unpickled by this process during a test."""
    found: list[str] = []
    watching = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if watching and (
            event in EVENTS
            or (event == "open" and arguments[2] is not None and arguments[2] & (os.O_WRONLY | os.O_RDWR))
        ):
            found.append(f"{event} {arguments}")

    sys.addaudithook(hook)  # which stays until the process ends
    yield found
    watching = False


@pytest.mark.slow
async def test_text_of_clients_is_not_executed(serving: Any, effects: list[str], tmp_path: Any) -> None:
    marker = tmp_path / "marker"
    texts = [
        f"{{{{ cycler.__init__.__globals__.os.system('touch {marker}') }}}}",
        f"{{% set x = cycler.__init__.__globals__.os.mkdir('{marker}') %}}",
        f"$(touch {marker})", f"__import__('os').mkdir('{marker}')", f"../../../../..{marker}", "cposix\nsystem\n.",
    ]  # fmt: skip

    async with serving() as served:
        await served.send("/chat/completions", BODY)  # imports what a request needs
        (tmp_path / "watched").touch()
        assert effects
        effects.clear()
        for text in texts:
            function = {"name": text, "description": text, "parameters": {"type": "object", "title": text}}
            call = {"id": text, "type": "function", "function": {"name": text, "arguments": text}}
            said = [
                {"role": "system", "content": text}, {"role": "user", "content": text, "name": text},
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": text, "content": text},
            ]  # fmt: skip
            chat = {"model": text, "messages": said, "user": text, "metadata": {text: text}}
            asked = {"model": text, "input": text, "instructions": text, "previous_response_id": text}
            for path, body in (
                ("/chat/completions", {**BODY, "messages": said[:2]}),
                ("/chat/completions", chat),
                ("/chat/completions", {**chat, "tools": [{"type": "function", "function": function}]}),
                ("/responses", asked),
                (f"/sessions/{served.session.id}/reward", {"reward": 1.0, text: text}),
            ):
                assert (await served.send(path, body)).status_code in (200, 400, 404)
            assert text in served.completer.tokenizer.decode(served.completer.asked[-1][0])
    assert not effects
    assert not marker.exists()
