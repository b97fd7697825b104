"""Bodies of requests within their limits, errors in OpenAI's form, and answers that reach a client which is still
sending its body.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rlframework.environments.tool_episodes import json_value

if TYPE_CHECKING:
    from starlette.responses import Response


class ApiError(Exception):
    """A request was rejected with the HTTP status `status`; the text says what was given and what is allowed."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's API does."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


def unauthorized() -> ApiError:
    """Return the error of a token that belongs to no open session. It says nothing else."""
    return ApiError("invalid bearer token", status=401, code="invalid_api_key")


Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

_MOST_DISCARDED = 64 * 2**20
"""Bytes of a rejected body that are read and thrown away."""
_LONGEST_DISCARDING = 10.0
"""Seconds for that."""


class Incoming:
    """The messages of one request, as ASGI's `receive`. `whole`: no more of its body comes."""

    def __init__(self, receive: Receive) -> None:
        self._receive, self.whole = receive, False

    async def __call__(self) -> Message:
        """Return the next message."""
        message = await self._receive()
        self.whole = self.whole or message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def body(self, headers: Mapping[str, str], most: int) -> dict[str, Any]:
        """Read and parse the body. `ApiError` 413 as soon as it is too large, 400 if it is not a JSON object."""
        announced = headers.get("content-length", "0")
        parts, large = bytearray(), announced.isdigit() and int(announced) > most
        while not large and not self.whole:
            parts += (await self()).get("body", b"")
            large = len(parts) > most
        if large:
            raise ApiError(f"the body has more than {most} bytes", status=413, code="too_large")
        try:
            body = json_value(parts)
        except (ValueError, RecursionError) as error:
            raise ApiError(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise ApiError(f"the body is not a JSON object, but {type(body).__name__}")
        return body

    async def discard(self) -> None:
        """Read what is left of the body: a connection that is closed before would be reset, and the answer lost."""
        left = _MOST_DISCARDED
        with suppress(TimeoutError):  # of a client that sends no more
            async with asyncio.timeout(_LONGEST_DISCARDING):
                while not self.whole and left > 0:
                    left -= len((await self()).get("body", b""))


async def answer_early(response: Response, incoming: Incoming, send: Send) -> None:
    """Send `response` at once, although the body of its request may still come."""
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await incoming.discard()
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """Return an answer in ASCII: what a client has sent and gets back may have lone surrogates."""
    from starlette.responses import Response

    return Response(json.dumps(content, allow_nan=False), status, headers, "application/json")
