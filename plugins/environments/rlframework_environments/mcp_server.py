"""Running MCP servers: each is a program in a process group of its own, served by a thread with an event loop.

The thread lives as long as its server, because the kernel ends the program with the thread that started it, and because
a server for a whole run outlives the event loops of its rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from rlframework.base.errors import ConfigError, RLFrameworkError
from rlframework.base.logs import plugin_logger
from rlframework.environments import process_ends
from rlframework.environments.tool_episodes import RejectedCall, spec
from rlframework.interfaces.messages import ToolSpec
from rlframework_environments.config import McpConfig

if TYPE_CHECKING:
    from mcp import ClientSession, StdioServerParameters

_LOG = plugin_logger(__name__)

_END_SECONDS = 10.0
"""For a server to end: the client closes its input, then sends SIGTERM, then SIGKILL, each after two seconds."""

_LOG_CHARACTERS = 2000

_THREAD = "MCP server"
_PRINTS: dict[str, object] = {}
"""The servers that have been warned of, because they print to their standard output."""


class McpServer:
    """The server that `McpConfig.command` starts, on the first use."""

    def __init__(self, config: McpConfig) -> None:
        self._config = config
        self._name = f"the MCP server {' '.join(config.command)!r} (environment.command)"
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ready: Future[tuple[ClientSession, tuple[ToolSpec, ...]]] = Future()
        self._stopping = False
        self.lost = False
        """Whether the server did not start, or ended by itself."""

    async def tools(self) -> tuple[ToolSpec, ...]:
        """Start the server once, and return its tools. Raises `ConfigError` with what it wrote if it does not start."""
        with self._lock:
            if self._thread is None:
                self._loop = asyncio.new_event_loop()
                self._task = self._loop.create_task(self._serve())
                self._thread = threading.Thread(target=self._run, name=_THREAD, daemon=True)
                self._thread.start()
        ready = asyncio.wrap_future(self._ready)
        ready.add_done_callback(lambda done: done.cancelled() or done.exception())  # seen, also by who left
        try:
            return (await asyncio.shield(ready))[1]  # others wait for it too
        except asyncio.CancelledError as error:
            error.add_note(f"{self._name} has not answered its initialization{self._log()}")
            raise

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[bool, str]:
        """Return whether the call failed, and the text of its result.

        Raises `RejectedCall` if it takes more than `call_timeout`, and `RLFrameworkError` if the server has ended.
        """
        session, seconds = self._ready.result(0)[0], self._config.call_timeout
        try:
            with self._lock:  # a loop that is about to be closed takes no call
                if self.lost:
                    raise ConnectionError
                result = asyncio.run_coroutine_threadsafe(_call(session, name, arguments, seconds), self._loop)
            return await asyncio.wrap_future(result)
        except TimeoutError:
            raise RejectedCall(f"{name!r} took more than {seconds:g} s") from None
        except (ConnectionError, asyncio.CancelledError) as error:
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # the caller has been cancelled, and not the call by the end of the server
            self.lost, written = True, self._log()
            self.stop()
            raise RLFrameworkError(f"{self._name} ended during a call of {name!r}{written}") from None
        except Exception as error:
            raise RLFrameworkError(
                f"{self._name} failed at a call of {name!r}: {type(error).__name__}: {error}{self._log()}"
            ) from error

    async def close(self) -> None:
        """End the server, and wait until it has ended."""
        if self._thread is not None:
            await asyncio.to_thread(self.end)

    def end(self) -> None:
        """End the server, and wait until it has ended. Does nothing the second time, or if none was started."""
        if self._thread is None:
            return
        self.stop()
        self._thread.join(_END_SECONDS)

    def stop(self) -> None:
        """Let the thread end the server. Once: a second cancellation would cut that short."""
        if self._stopping:
            return
        self._stopping = True
        with contextlib.suppress(RuntimeError):  # the loop has closed: the server has ended before
            self._loop.call_soon_threadsafe(self._task.cancel)

    def _run(self) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as self._stderr:
            try:
                self._loop.run_until_complete(self._task)
            except BaseException as error:  # noqa: BLE001 - raised where the tools are asked for
                with self._lock:
                    self.lost = True
                if not self._ready.done():
                    self._ready.set_exception(self._start_error(error))
            finally:
                self._loop.run_until_complete(_cancel_calls())
                self._loop.close()

    async def _serve(self) -> None:
        from mcp import ClientSession, stdio_client

        logging.getLogger("mcp.client.stdio").addFilter(_is_shown)
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(self._config.start_timeout):
                streams = await stack.enter_async_context(stdio_client(self._parameters(), errlog=self._stderr))
                session = await stack.enter_async_context(ClientSession(*streams, message_handler=self._received))
                await session.initialize()
                tools = await _tools(session)
            self._ready.set_result((session, tools))
            await asyncio.get_running_loop().create_future()  # until `end` cancels this task

    async def _received(self, message: object) -> None:
        """Warn, once for each command, of a line that the server has printed among its messages."""
        token = object()
        if isinstance(message, ValidationError) and _PRINTS.setdefault(self._name, token) is token:
            _LOG.warning(
                "%s prints to its standard output, which is for messages of the protocol, so what it prints is left "
                "out: %.80r. Print to standard error: print(..., file=sys.stderr)",
                self._name, message.errors()[0]["input"],
            )  # fmt: skip

    def _parameters(self) -> StdioServerParameters:
        from mcp import StdioServerParameters

        given = {name: os.environ[name] for name in self._config.variables if name in os.environ}
        program = [str(Path(process_ends.__file__)), *self._config.command]
        return StdioServerParameters(command=sys.executable, args=["-P", *program], env=given)

    def _start_error(self, error: BaseException) -> ConfigError:
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        seconds = self._config.start_timeout
        late = f"it did not answer within {seconds:g} s (environment.start_timeout)"
        reason = late if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        return ConfigError(f"{self._name} did not start: {reason}{self._log()}")

    def _log(self) -> str:
        """The end of what the server wrote to its standard error."""
        try:
            text = os.pread(self._stderr.fileno(), 1_000_000, 0).decode(errors="replace").strip()
        except (AttributeError, OSError, ValueError):  # it is not open yet, or has been closed
            return ""
        return f". It wrote:\n{text[-_LOG_CHARACTERS:]}" if text else ""


def _is_shown(record: logging.LogRecord) -> bool:
    """Whether the SDK's message is shown: not of a line that is no message, which `McpServer` warns of."""
    return record.threadName != _THREAD or not record.getMessage().startswith("Failed to parse JSONRPC message")


async def _tools(session: ClientSession) -> tuple[ToolSpec, ...]:
    """The server's tools, of all pages."""
    from mcp.types import PaginatedRequestParams

    page = await session.list_tools()
    found = [*page.tools]
    while page.next_cursor:
        page = await session.list_tools(params=PaginatedRequestParams(cursor=page.next_cursor))
        found += page.tools
    return tuple(spec(tool.name, tool.description or "", tool.input_schema) for tool in found)


async def _cancel_calls() -> None:
    """End the calls that the server has not answered."""
    calls = asyncio.all_tasks() - {asyncio.current_task()}
    for call in calls:
        call.cancel()
    await asyncio.gather(*calls, return_exceptions=True)


async def _call(session: ClientSession, name: str, arguments: Mapping[str, Any], seconds: float) -> tuple[bool, str]:
    """Whether the call failed, and its text. Raises `TimeoutError`, and `ConnectionError` if the server has ended."""
    from mcp import MCPError
    from mcp.types import CONNECTION_CLOSED, CallToolResult

    try:
        async with asyncio.timeout(seconds):
            result = await session.call_tool(name, dict(arguments))
    except MCPError as error:
        if error.error.code == CONNECTION_CLOSED:
            raise ConnectionError(str(error)) from error
        return True, str(error)
    if not isinstance(result, CallToolResult):
        return True, f"the server asks for what cannot be given: {type(result).__name__}"
    texts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    return bool(result.is_error), "\n".join(texts)


class McpPool:
    """Running servers that no episode uses. Each is used by one episode at a time, which resets it before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[McpServer] = []
        self._ended = False

    def take(self) -> McpServer | None:
        """Return the server that was left last, or None."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def leave(self, server: McpServer) -> bool:
        """Keep a server for later episodes, and return whether that is done: not after `end`."""
        with self._lock:
            if not self._ended:
                self._idle.append(server)
            return not self._ended

    def end(self) -> None:
        """End the servers, all at the same time, and keep no more."""
        with self._lock:
            idle, self._idle, self._ended = self._idle, [], True
        for server in idle:
            server.stop()
        for server in idle:
            server.end()
