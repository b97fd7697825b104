"""A running MCP server: a program in a process group of its own, served by a thread with an event loop.

The thread lives as long as the server, because the kernel ends the program with the thread that started it, and because
a server for a whole run outlives the event loops of its rollouts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rlframework.config.episode_environments import McpConfig
from rlframework.environments import process_ends
from rlframework.environments.tool_calls import RejectedCall, spec
from rlframework.errors import ConfigError, RLFrameworkError
from rlframework.interfaces.messages import ToolSpec

if TYPE_CHECKING:
    from mcp import ClientSession, StdioServerParameters

T = TypeVar("T")

_END_SECONDS = 10.0
"""For a server to end: the client closes its input, then sends SIGTERM, then SIGKILL, each after two seconds."""

_LOG_CHARACTERS = 2000


class McpServer:
    """The server that `McpConfig.command` starts, on the first use."""

    def __init__(self, config: McpConfig) -> None:
        self._config = config
        self._name = f"the MCP server {' '.join(config.command)!r} (environment.command)"
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ready: Future[tuple[ClientSession, tuple[ToolSpec, ...]]] = Future()
        self._ended = threading.Event()

    async def tools(self) -> tuple[ToolSpec, ...]:
        """Return the server's tools, having started it. Raises `ConfigError` with what it wrote if it does not start."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="MCP server", daemon=True)
                self._thread.start()
        return (await asyncio.wrap_future(self._ready))[1]

    async def call(self, name: str, arguments: Mapping[str, Any]) -> tuple[bool, str]:
        """Return whether the call failed, and the text of its result.

        Raises `RejectedCall` if it takes more than `call_timeout`, and `RLFrameworkError` if the server has ended.
        """
        session = self._ready.result(0)[0]
        seconds = self._config.call_timeout
        try:
            result = await self._in_thread(_call(session, name, arguments, seconds))
        except TimeoutError:
            raise RejectedCall(f"{name!r} took more than {seconds:g} s") from None
        except _Refused as error:
            return True, str(error)
        except Exception as error:
            raise RLFrameworkError(
                f"{self._name} failed at a call of {name!r}: {type(error).__name__}: {error}{self._log()}"
            ) from error
        return result

    async def close(self) -> None:
        """End the server, and wait until it has ended."""
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """End the server, and wait until it has ended. Does nothing the second time, or if none was started."""
        if self._thread is None:
            return
        if self._thread.is_alive() and not self._ended.is_set():
            self._ended.set()
            with contextlib.suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(_END_SECONDS)

    async def _in_thread(self, work: Coroutine[Any, Any, T]) -> T:
        if self._ended.is_set() or self._thread is None or not self._thread.is_alive():
            work.close()
            raise RuntimeError("it has ended")
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _run(self) -> None:
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as self._stderr:
            self._loop = asyncio.new_event_loop()
            try:
                self._loop.run_until_complete(self._serve())
            except Exception as error:  # noqa: BLE001 - raised where the tools are asked for
                if not self._ready.done():
                    self._ready.set_exception(self._start_error(error))
            finally:
                self._loop.close()

    async def _serve(self) -> None:
        from mcp import ClientSession, stdio_client

        self._end = asyncio.Event()
        async with contextlib.AsyncExitStack() as stack:
            async with asyncio.timeout(self._config.start_timeout):
                streams = await stack.enter_async_context(stdio_client(self._parameters(), errlog=self._stderr))
                session = await stack.enter_async_context(ClientSession(*streams))
                await session.initialize()
                tools = await _tools(session)
            self._ready.set_result((session, tools))
            await self._end.wait()

    def _parameters(self) -> StdioServerParameters:
        from mcp import StdioServerParameters

        given = {name: os.environ[name] for name in self._config.variables if name in os.environ}
        program = [str(Path(process_ends.__file__)), *self._config.command]
        return StdioServerParameters(command=sys.executable, args=["-P", *program], env=given)

    def _start_error(self, error: Exception) -> ConfigError:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        seconds = self._config.start_timeout
        late = f"it did not answer within {seconds:g} s (environment.start_timeout)"
        reason = late if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
        return ConfigError(f"{self._name} did not start: {reason}{self._log()}")

    def _log(self) -> str:
        """The end of what the server wrote to its standard error."""
        try:
            text = os.pread(self._stderr.fileno(), 1_000_000, 0).decode(errors="replace").strip()
        except (OSError, ValueError):  # it has been closed
            return ""
        return f". It wrote:\n{text[-_LOG_CHARACTERS:]}" if text else ""


class _Refused(Exception):
    """The server answered with a protocol error."""


async def _tools(session: ClientSession) -> tuple[ToolSpec, ...]:
    """The server's tools, of all pages."""
    found: list[ToolSpec] = []
    page = await session.list_tools()
    while True:
        found += [spec(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
        if not page.next_cursor:
            return tuple(found)
        page = await session.list_tools(cursor=page.next_cursor)


async def _call(session: ClientSession, name: str, arguments: Mapping[str, Any], seconds: float) -> tuple[bool, str]:
    from mcp import MCPError

    async with asyncio.timeout(seconds):
        try:
            result = await session.call_tool(name, dict(arguments))
        except MCPError as error:
            raise _Refused(str(error)) from error
    parts: Sequence[Any] = result.content
    texts = [part.text if part.type == "text" else f"[{part.type}]" for part in parts]
    return bool(result.is_error), "\n".join(texts)
