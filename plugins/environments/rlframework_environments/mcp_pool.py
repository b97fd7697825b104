"""MCP servers that one episode has left, for a later one."""

from __future__ import annotations

import threading

from rlframework_environments.mcp_server import McpServer


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
