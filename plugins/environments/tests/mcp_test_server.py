"""A real MCP server over stdio, as a user would write it with the SDK; its state is per process."""

import os
import sys
import time

from mcp.server import MCPServer

server = MCPServer("notes")
notes = []


@server.tool()
def add_note(text: str) -> str:
    """Keep a note."""
    notes.append(text)
    return f"{len(notes)} notes"


@server.tool()
def forget() -> str:
    """Forget the notes, unless one of them says to keep them."""
    if "keep" in notes:
        raise ValueError("these are kept")
    notes.clear()
    return "forgotten"


@server.tool()
def fail(reason: str) -> str:
    """Fail."""
    raise ValueError(reason)


@server.tool()
def wait(seconds: float) -> str:
    """Wait."""
    time.sleep(seconds)
    return "waited"


@server.tool()
def stop() -> str:
    """End the server."""
    print("the server ends", file=sys.stderr, flush=True)
    os._exit(3)


@server.tool()
def variable(name: str) -> str:
    """Read an environment variable."""
    return os.environ.get(name, "unset")


@server.tool()
def process() -> str:
    """Return the process id."""
    return str(os.getpid())


if __name__ == "__main__":
    server.run("stdio")
