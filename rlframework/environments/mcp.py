"""The tools of an MCP server, started as a program and spoken to over its standard streams, as an environment."""

from __future__ import annotations

from collections.abc import Sequence

from rlframework.config.episode_environments import McpConfig
from rlframework.environments.mcp_server import McpServer
from rlframework.environments.tool_calls import RejectedCall, answer, names_of, object_of, refusal, require_known
from rlframework.environments.tool_environment import ToolDataEnvironment
from rlframework.environments.tool_episodes import Score, ToolSession
from rlframework.errors import ConfigError
from rlframework.interfaces.environment import Sample
from rlframework.interfaces.messages import Message, ToolCall, ToolSpec


class McpEnvironment(ToolDataEnvironment):
    """Rows of data as tasks, which the model solves with the tools of an MCP server."""

    def __init__(self, config: McpConfig, *, seed: int) -> None:
        """Open the data; no server is started yet. Raises `ConfigError` if the package `mcp` is missing."""
        try:
            import mcp  # noqa: F401 - whether it is installed
        except ImportError as error:
            raise ConfigError("environment.name=mcp needs MCP: pip install 'rlframework-core[mcp]'") from error
        super().__init__(config, seed=seed)
        self._server_config = config
        self._shared = McpServer(config) if config.server_per == "run" else None

    def session(self, sample: Sample, seed: int) -> tuple[ToolSession, Score]:
        """Return the tools of a server, its own or the shared one, and the configured reward."""
        if self._shared is not None and self._shared.lost:
            self._shared = McpServer(self._server_config)
        return McpSession(self._server_config, self._shared), self._scores.score

    def shutdown(self) -> None:
        """End the shared server, and the process of the reward function."""
        if self._shared is not None:
            self._shared.end()
        super().shutdown()


class McpSession(ToolSession):
    """The tools of the server `shared`, or of one that lives as long as the session."""

    def __init__(self, config: McpConfig, shared: McpServer | None) -> None:
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
            arguments = object_of(call)
            failed, text = await self._server.call(call["function"]["name"], arguments)
        except RejectedCall as error:
            return refusal(call, error, limit)
        return refusal(call, text, limit) if failed else answer(call, text, limit)

    async def close(self) -> None:
        """End the server, unless it is shared."""
        if self._owns:
            await self._server.close()
