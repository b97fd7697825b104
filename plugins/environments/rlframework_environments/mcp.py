"""The tools of an MCP server, started as a program and spoken to over its standard streams, as an environment."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from rlframework.base.errors import ConfigError, RLFrameworkError
from rlframework.base.logs import plugin_logger
from rlframework.environments.tool_environment import ToolDataEnvironment
from rlframework.environments.tool_episodes import (
    RejectedCall,
    Score,
    ToolSession,
    answer,
    names_of,
    object_of,
    refusal,
    require_known,
)
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import Message, ToolCall, ToolSpec
from rlframework_environments.config import McpConfig
from rlframework_environments.mcp_server import McpPool, McpServer

_LOG = plugin_logger(__name__)


class McpEnvironment(ToolDataEnvironment):
    """Rows of data as tasks, which the model solves with the tools of an MCP server."""

    def __init__(self, config: McpConfig, *, seed: int) -> None:
        """Open the data; no server is started yet. Raises `ConfigError` if the program or `mcp` is missing."""
        try:
            import mcp  # noqa: F401 - whether it is installed
        except ImportError as error:
            raise ConfigError("environment.name=mcp needs MCP: pip install 'rlframework-core[mcp]'") from error
        if shutil.which(config.command[0]) is None:
            raise ConfigError(
                f"environment.command={list(config.command)}: there is no program {config.command[0]!r}; give the path "
                "of one, or the name of one on PATH"
            )
        super().__init__(config, seed=seed)
        self._server_config = config
        self._shared = McpServer(config) if config.server_per == "run" else None
        self._pool = McpPool() if config.reset_tool else None

    def session(self, sample: Sample, seed: int) -> tuple[ToolSession, Score]:
        """Return the tools of a server, the session's alone or the shared one, and the configured reward."""
        if self._pool is not None:
            return KeptMcpSession(self._server_config, self._pool), self._scores.score
        if self._shared is not None and self._shared.lost:
            self._shared = McpServer(self._server_config)
        return McpSession(self._server_config, self._shared), self._scores.score

    def shutdown(self) -> None:
        """End the servers that run, and the process of the reward function."""
        if self._shared is not None:
            self._shared.end()
        if self._pool is not None:
            self._pool.end()
        super().shutdown()


class McpSession(ToolSession):
    """The tools of the server `shared`, or of one that lives as long as the session."""

    def __init__(self, config: McpConfig, shared: McpServer | None = None) -> None:
        self._config, self._owns = config, shared is None
        self._server = McpServer(config) if shared is None else shared
        self._names: tuple[str, ...] = ()

    async def open(self) -> Sequence[ToolSpec]:
        """Start the server, unless it is shared and runs."""
        tools = await self._server.tools()
        self._names = names_of(tools)
        return tools

    async def call(self, call: ToolCall) -> Message:
        """Call the tool. What the server calls an error, and a call that takes too long, are observations too."""
        limit = self._config.max_result_characters
        try:
            require_known(call["function"]["name"], self._names)
            failed, text = await self._answer(call["function"]["name"], object_of(call))
        except RejectedCall as error:
            return refusal(call, error, limit)
        return refusal(call, text, limit) if failed else answer(call, text, limit)

    async def close(self) -> None:
        """End the server, unless it is shared."""
        if self._owns:
            await self._server.close()

    async def _answer(self, name: str, arguments: Mapping[str, Any]) -> tuple[bool, str]:
        """Return whether the server's tool failed, and its text."""
        return await self._server.call(name, arguments)


class KeptMcpSession(McpSession):
    """The tools of a server of `pool` that has been reset, or of a new one. The model does not see the reset.

    The server is left to the pool unless a call of it has not ended, which could go on into another episode.
    """

    def __init__(self, config: McpConfig, pool: McpPool) -> None:
        super().__init__(config)
        self._pool, self._answering = pool, 0

    async def open(self) -> Sequence[ToolSpec]:
        """Reset a server that an episode has left, or start one."""
        while (server := self._pool.take()) is not None:
            fresh, self._server = self._server, server
            if await self._reset():
                break
            await server.close()
            self._server, self._answering = fresh, 0
        tools, reset = await super().open(), self._config.reset_tool
        if reset not in self._names:
            raise ConfigError(
                f"environment.reset_tool {reset!r} is no tool of the server; its tools are: {', '.join(self._names)}"
            )
        self._names = tuple(name for name in self._names if name != reset)
        return [tool for tool in tools if tool["function"]["name"] != reset]

    async def close(self) -> None:
        """Leave the server to later episodes if it has started and answered all calls; else end it."""
        if not self._names or self._answering or not self._pool.leave(self._server):
            await self._server.close()

    async def _reset(self) -> bool:
        """Return whether the server has reset itself."""
        try:
            failed, text = await self._answer(self._config.reset_tool, {})
        except (RejectedCall, RLFrameworkError) as error:
            failed, text = True, str(error)
        if failed:
            _LOG.warning("environment.reset_tool failed, so another MCP server is started: %s", text)
        return not failed

    async def _answer(self, name: str, arguments: Mapping[str, Any]) -> tuple[bool, str]:
        self._answering += 1
        answered = await super()._answer(name, arguments)
        self._answering -= 1
        return answered
