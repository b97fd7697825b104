"""Requests beyond a limit: what they cost, and what their clients are told."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from rlframework.datasets.chat import chat_format
from rlframework_serve import bodies
from rlframework_serve.server import Endpoint


def asks(content: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content}]}


async def raw(served: Any, request: str) -> bytes:
    """The first line of the answer."""
    reader, writer = await asyncio.open_connection(*served.address())
    writer.write(request.encode())
    line = await asyncio.wait_for(reader.readline(), 60)
    writer.close()
    return line


async def test_every_method_and_target_without_a_token_gets_401(served: Any) -> None:
    for method in ("GET", "HEAD", "OPTIONS", "TRACE", "PROPFIND", "POST"):
        for target in ("/", "/v1/models", "/v1/nothing", "*"):
            line = await raw(served, f"{method} {target} HTTP/1.1\r\nHost: a\r\n\r\n")
            assert b" 401 " in line, (method, target, line)


@pytest.mark.parametrize("authorized", [True, False])
def test_an_answer_to_a_body_that_still_comes_is_sent_at_once_and_the_rest_is_read(authorized: bool) -> None:
    """A server that closes the connection before resets it, and the client sees no 413."""
    from rlframework_serve.sessions import Session

    endpoint = Endpoint(None, "policy", max_body=100)  # type: ignore[arg-type]
    session = endpoint.sessions.open(Session("engine"))
    token = session.token if authorized else "wrong"
    events: list[str] = []
    parts = iter([(b"x" * 101, True), (b"x" * 50, True), (b"", False)])

    async def receive() -> Any:
        body, more = next(parts)
        events.append(f"read {len(body)}")
        return {"type": "http.request", "body": body, "more_body": more}

    async def send(message: Any) -> None:
        end = "" if message.get("more_body", True) else ", the end"
        events.append(str(message["status"]) if "status" in message else f"sent {bool(message['body'])}{end}")

    scope = {
        "type": "http", "method": "POST", "path": "/v1/responses", "query_string": b"", "server": ("a", 1),
        "headers": [(b"authorization", f"Bearer {token}".encode())],
    }  # fmt: skip
    asyncio.run(endpoint.app()(scope, receive, send))  # type: ignore[arg-type]
    reads = ["read 101", "read 50", "read 0"]
    known = [*reads[:1], "413"] if authorized else ["401"]
    assert events == [*known, "sent True", *reads[authorized:], "sent False, the end"]


def test_a_body_without_end_is_not_read_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_MOST_DISCARDED", 1000)
    read = 0

    async def receive() -> Any:
        nonlocal read
        read += 100
        return {"type": "http.request", "body": b"x" * 100, "more_body": True}

    asyncio.run(bodies.Incoming(receive).discard())
    assert read == 1000


async def test_the_rest_of_a_body_is_not_waited_for_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_LONGEST_DISCARDING", 0.01)

    async with asyncio.timeout(60):
        await bodies.Incoming(asyncio.Event().wait).discard()  # type: ignore[arg-type]


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Context in which this process cannot open a file or a connection."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    opened = [os.open(os.devnull, os.O_RDONLY)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (opened[0] + 1, hard))
    with suppress(OSError):
        while True:
            opened.append(os.open(os.devnull, os.O_RDONLY))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for number in opened:
            os.close(number)


def test_connections_wait_for_descriptors(
    serving: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import socket

    monkeypatch.setattr(asyncio.constants, "ACCEPT_RETRY_DELAY", 0.001)

    async def run() -> None:
        async with serving() as served:
            address = served.address()
            with socket.socket() as client:
                client.setblocking(False)
                with no_descriptors():
                    await asyncio.get_running_loop().sock_connect(client, address)  # the system accepts it
                    for _ in range(10):
                        await asyncio.sleep(0.002)  # it tries again
                client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
                answer = await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 100), 60)
                assert b" 401 " in answer

    with caplog.at_level(logging.WARNING):
        asyncio.run(run())
    (record,) = caplog.records
    assert "cannot accept connections now" in record.message
    assert "ulimit -n" in record.message
    assert record.exc_info is None


async def test_a_prompt_that_cannot_fit_is_not_tokenised(serving: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(max_body=4 * 2**20) as served:
        monkeypatch.setattr(chat_format.ChatFormat, "prompt", None)  # it would be a 500
        longest = max(map(len, served.completer.tokenizer.get_vocab()))
        reply = await served.send("/chat/completions", asks("a" * (max(65_536, 2000 * longest) + 1)))
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "context_length_exceeded")
        assert "characters" in reply.json()["error"]["message"]
        assert served.session.limit == "max_episode_tokens"


@pytest.mark.parametrize(
    ("said", "description", "in_loop"),
    [
        ([{"role": "user", "content": "a" * 100}], "a", True),
        ([{"role": "user", "content": "a" * 65_537}], "a", False),
        ([{"role": "assistant", "content": "a" * 65_537}], "a", False),
        ([{"role": "user", "content": "a"}] * 2500, "a", False),
        ([{"role": "user", "content": "a"}], "a" * 65_537, False),
    ],
)
async def test_a_long_prompt_is_tokenised_outside_the_loop(
    serving: Any, monkeypatch: pytest.MonkeyPatch, said: Any, description: str, in_loop: bool
) -> None:
    threads: list[bool] = []

    def noted(*_: Any) -> list[int]:
        threads.append(threading.current_thread() is loop)
        return [5]

    loop = threading.current_thread()
    monkeypatch.setattr(chat_format.ChatFormat, "prompt", noted)
    tool = {"type": "function", "function": {"name": "f", "description": description}}

    async with serving() as served:
        served.endpoint._sampler._most = None
        body = json.dumps({"messages": said, "tools": [tool]})
        assert (await served.send("/chat/completions", body)).status_code == 200
    assert threads == [in_loop]


def test_the_limit_of_characters_counts_what_all_templates_render() -> None:
    from rlframework.huggingface.tokenizer import character_tokenizer

    chat = chat_format.ChatFormat(character_tokenizer("ab"))
    longest = max(map(len, chat._tokenizer.get_vocab()))
    most = 70_000
    said: Any = [{"role": "user", "content": "a" * most * longest}]
    assert not chat.is_longer(said, most)
    assert not chat.is_longer([*said, {"role": "assistant", "content": "<think>" * 10}], most)  # may be left out
    assert chat.is_longer([*said, {"role": "tool", "content": "a"}], most)


def test_a_token_id_beyond_64_bits_is_rejected() -> None:
    from rlframework_serve.bodies import ApiError
    from rlframework_serve.completions import PromptScorer

    scorer: Any = PromptScorer(None, None, None)  # type: ignore[arg-type]
    for token in (2**63, 2**31, -1, True):
        with pytest.raises(ApiError, match="integers from 0 to 2147483647"):
            asyncio.run(scorer.answer({"prompt": [1, token], "prompt_logprobs": 0}, "policy"))


def test_pixels_are_bounded_before_images_are_decoded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 100 pixels each, where one image may have 100 and new ones 400 together."""
    import base64
    from io import BytesIO

    from PIL import Image

    from rlframework.config.sections import ImagesConfig
    from rlframework_serve import image_parts
    from rlframework_serve.bodies import ApiError

    def part(number: int) -> dict[str, Any]:
        stored = BytesIO()
        Image.new("RGB", (10, 10), (number, 0, 0)).save(stored, "PNG")
        address = f"data:image/png;base64,{base64.b64encode(stored.getvalue()).decode()}"
        return {"type": "image_url", "image_url": {"url": address}}

    decoded: list[str] = []
    monkeypatch.setattr(image_parts, "decoded", lambda picture: decoded.append(picture.where))
    first = image_parts.ImageReader(ImagesConfig(max_pixels=100))
    for number in range(4):
        first.read(part(number), str(number))
        first.read(part(number), "again")
    with pytest.raises(ApiError, match="500 pixels up to this one; they may have 400"):
        first.read(part(4), "4")
    assert decoded == ["0", "1", "2", "3"]
    image_parts.ImageReader(ImagesConfig(max_pixels=100), first.kept).read(part(4), "4")  # of the next request
    assert len(first.kept) == 5
