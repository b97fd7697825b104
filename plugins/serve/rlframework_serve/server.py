"""The HTTP server of the endpoint, on asyncio. It reads and writes no files."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from rlframework.base.errors import ConfigError, UserError
from rlframework.base.logs import plugin_logger
from rlframework.config.sections import ImagesConfig
from rlframework_serve.bodies import ApiError, Incoming, answer_early, json_response
from rlframework_serve.chat import ChatReply, Reply
from rlframework_serve.completions import Completer, CompletionReply, PromptScorer
from rlframework_serve.image_parts import ImageReader
from rlframework_serve.request_bodies import TurnRequest, chat_request, completion_request
from rlframework_serve.responses import ResponsesReply, responses_request
from rlframework_serve.sampling import Choice, Sampler
from rlframework_serve.sessions import Session, Sessions

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Receive, Scope, Send

R = TypeVar("R")
C = TypeVar("C")

_LOG = plugin_logger(__name__)

MAX_BODY = 4 * 2**20
"""Bytes of a request's body; larger ones are rejected with 413."""

MAX_BODY_WITH_IMAGES = 64 * 2**20
"""The same for an endpoint that takes images, which each request of a conversation has again."""

_KEEP_ALIVE = 10.0
"""Seconds between comments to a client that waits for a stream's next event."""

_CLOSING = 2
_BACKLOG = 2048
"""Connections that the system keeps until they are accepted."""


class Endpoint:
    """Answers requests of open `sessions` for the model `model`, which `sampler` samples from.

    `scorer`: scores the tokens of completions; None: only sampled tokens have log-probabilities. `images`: how to read
    images, which `sampler` then takes too; None: they are rejected. `max_body`: bytes of a request; None: `MAX_BODY`,
    with images `MAX_BODY_WITH_IMAGES`.
    """

    def __init__(
        self,
        sampler: Sampler,
        model: str,
        *,
        max_body: int | None = None,
        scorer: PromptScorer | None = None,
        images: ImagesConfig | None = None,
    ) -> None:
        self.sessions = Sessions()
        self.model, self._sampler, self._scorer, self._images = model, sampler, scorer, images
        default = MAX_BODY if images is None else MAX_BODY_WITH_IMAGES
        self._max_body = default if max_body is None else max_body

    def app(self) -> ASGIApp:
        """Return the ASGI application. Without a valid token, all but `GET /health` answers 401."""
        from starlette.requests import Request

        async def answer(scope: Scope, receive: Receive, send: Send) -> None:
            incoming = Incoming(receive)
            response = await self._response(Request(scope, incoming), incoming)
            if response.status_code >= 400 and not incoming.whole:
                await answer_early(response, incoming, send)
            else:
                await response(scope, incoming, send)

        return answer

    async def _response(self, request: Request, incoming: Incoming) -> Response:
        from starlette.responses import Response

        try:
            if request.method in ("GET", "HEAD") and request.url.path == "/health":
                return json_response({"status": "ok"})
            session = self.sessions.find(request.headers.get("authorization"))
            return await self._answer(request, incoming, session)
        except ApiError as error:
            headers = {"WWW-Authenticate": "Bearer"} if error.status == 401 else None
            return json_response(error.body(), error.status, headers)
        except _Disconnected:
            return Response(status_code=499)
        except Exception:  # noqa: BLE001 - logged, and one request alone fails
            _LOG.exception("the endpoint failed")
            return json_response(_FAILED.body(), _FAILED.status)

    async def _answer(self, request: Request, incoming: Incoming, session: Session) -> Response:
        path, method = request.url.path.rstrip("/"), request.method
        read = partial(incoming.body, request.headers, self._max_body)
        if (method, path) == ("GET", "/v1/models"):
            return json_response(
                {
                    "object": "list",
                    "data": [{"id": self.model, "object": "model", "created": 0, "owned_by": "rlframework"}],
                }
            )
        if (method, path) == ("POST", "/v1/chat/completions"):
            body = await read()
            turn = await self._parsed(partial(chat_request, body, self._reader(session)))
            return await self._reply(request, session, body, turn, ChatReply(body, self.model, self._sampler.tokenizer))
        if (method, path) == ("POST", "/v1/completions"):
            return await self._completed(request, session, await read())
        if (method, path) == ("POST", "/v1/responses"):
            body = await read()
            turn = await self._parsed(partial(responses_request, body, session, self._reader(session)))
            return await self._reply(request, session, body, turn, ResponsesReply(body, self.model))
        if (method, path) == ("POST", f"/v1/sessions/{session.id}/reward"):
            session.set_reward(await read())
            return json_response({"id": session.id, "reward": session.reward})
        raise ApiError(f"there is no {method} {path[:200]}", status=404, code="not_found")

    async def _parsed(self, parse: Callable[[], TurnRequest]) -> TurnRequest:
        """Return the result of `parse`; of an endpoint that takes images, which it decodes, outside the event loop."""
        return parse() if self._images is None else await asyncio.to_thread(parse)

    def _reader(self, session: Session) -> ImageReader:
        return ImageReader(self._images, session.pictures if session.record else {})

    async def _reply(
        self,
        request: Request,
        session: Session,
        body: dict[str, Any],
        turn: TurnRequest,
        reply: ChatReply | ResponsesReply,
    ) -> Response:
        self._sampler.check(turn)
        return await self._sent(request, body, self._sampled(session, turn, reply), reply)

    async def _completed(self, request: Request, session: Session, body: dict[str, Any]) -> Response:
        """Answer a completion of text or token ids, or one that scores its prompt."""
        if self._scorer is not None and body.get("prompt_logprobs") is not None:
            return json_response(await self._scorer.answer(body, self.model))
        asked, completer = completion_request(body), Completer(self._sampler, self._scorer)
        completer.check(asked)
        reply = CompletionReply(asked, self.model, self._sampler.tokenizer)
        return await self._sent(request, body, session.run(completer.complete(session, asked)), reply)

    async def _sent(
        self, request: Request, body: dict[str, Any], work: Coroutine[Any, Any, list[C]], reply: Reply[C]
    ) -> Response:
        from starlette.responses import StreamingResponse

        if body.get("stream") is True:
            return StreamingResponse(self._stream(request, work, reply), media_type="text/event-stream")
        return json_response(reply.whole(await _unless_gone(request, work)))

    async def _sampled(self, session: Session, turn: TurnRequest, reply: ChatReply | ResponsesReply) -> list[Choice]:
        choices = await session.run(self._sampler.sample(session, turn))
        if isinstance(reply, ResponsesReply) and session.record:
            session.keep_response(reply.id, (*turn.messages, choices[0].message))
        return choices

    async def _stream(
        self, request: Request, work: Coroutine[Any, Any, list[C]], reply: Reply[C]
    ) -> AsyncIterator[str]:
        """Send events. The turn is aborted if the client goes away."""
        task = asyncio.ensure_future(_unless_gone(request, work))
        try:
            for event in reply.begin():
                yield event
            while not (await asyncio.wait({task}, timeout=_KEEP_ALIVE))[0]:
                yield ": waiting\n\n"
            try:
                events = reply.events(task.result())
            except ApiError as error:
                events = reply.failure(error.body())
            except _Disconnected:
                return
            except Exception:  # noqa: BLE001 - logged, and one request alone fails
                _LOG.exception("the endpoint failed")
                events = reply.failure(_FAILED.body())
            for event in events:
                yield event
        finally:
            task.cancel()
            await asyncio.wait({task})


_FAILED = ApiError("the server failed; its log says why", status=500, code="internal_error")


class _Disconnected(Exception):
    """The client has closed its connection."""


async def _unless_gone(request: Request, work: Coroutine[Any, Any, R]) -> R:
    """Return the result of `work`; cancel it and raise `_Disconnected` if the client closes its connection."""

    async def gone() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise _Disconnected
    finally:
        task.cancel()
        watch.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


@asynccontextmanager
async def served(endpoint: Endpoint, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Context in which the endpoint is served; yields its base URL. `port` 0: any free one.

    Raises `ConfigError` without the extra `serve`, and `UserError` for an address that cannot be used.
    """
    try:
        import uvicorn

        app = endpoint.app()
    except ModuleNotFoundError as error:
        raise ConfigError(f"the agent endpoint needs {error.name}: pip install 'rlframework-core[serve]'") from error
    listening = _listen(host, port)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, lifespan="off", server_header=False, ws="none", loop="none",
        timeout_graceful_shutdown=_CLOSING, backlog=1,
    )  # fmt: skip
    server = _server(config)
    asyncio.get_running_loop().set_exception_handler(_one_warning_without_descriptors())
    task = asyncio.ensure_future(server.serve(sockets=[listening]))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        listening.listen(_BACKLOG)
        _LOG.debug("endpoint: serving at port %d", listening.getsockname()[1])
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{listening.getsockname()[1]}/v1"
    finally:
        _LOG.debug("endpoint: stopping")
        server.should_exit = True
        with suppress(asyncio.CancelledError):
            await task
        listening.close()
        _LOG.debug("endpoint: stopped")


def _one_warning_without_descriptors() -> Callable[[asyncio.AbstractEventLoop, dict[str, Any]], None]:
    """Return a loop's handler of exceptions that logs one line, once, when no connection can be accepted.

    asyncio tries again each second, with a traceback; and as often as its backlog says, until Python 3.13. So that
    backlog is 1, and `_BACKLOG` is set for the socket alone.
    """
    warned = False

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        nonlocal warned
        error = context.get("exception")
        if "accept" not in context["message"] or not isinstance(error, OSError):
            loop.default_exception_handler(context)
        elif not warned:
            warned = True
            _LOG.warning(
                "the endpoint cannot accept connections now, and tries again each second: %s. Raise `ulimit -n`, or "
                "let fewer clients connect at once (environment.max_concurrent_episodes)", error.strerror,
            )  # fmt: skip

    return handle


def _server(config: Any) -> Any:
    """Return a server that leaves the process's signals alone."""
    from contextlib import nullcontext

    import uvicorn

    class Server(uvicorn.Server):
        def capture_signals(self) -> Any:
            return nullcontext()

    return Server(config)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # with its protocol, as asyncio sets TCP_NODELAY for no other: without it, each answer after the first on a
    # connection would wait 40 ms for the client's delayed acknowledgement
    listening = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((host, port))
    except (OSError, OverflowError) as error:
        listening.close()
        raise UserError(f"cannot listen on {host}:{port}: {error}") from error
    return listening
