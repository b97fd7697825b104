"""`commands.md`: the `--help` output of each `rlframework` command."""

from __future__ import annotations

from pieces import page as page_of
from typer import Context
from typer.main import get_command
from typer.testing import CliRunner

from rlframework.cli import app

_WIDTH = "100"
_TEXT = """Every command accepts `--debug`, before or after its name, to show the traceback of errors, and
`--log-level LEVEL` before its name: `debug` shows [where a run waits](troubleshooting.md#a-run-that-hangs). Exit codes:
0 for success; 2 for invalid input, with a single message; 1 for any other failure; 130 for Ctrl-C."""


def page() -> str:
    """Return the page."""
    parts = [part for name in _names() for part in (f"## `rlframework {name}`", f"```text\n{_help(name)}\n```")]
    return page_of("# Commands", _TEXT, *parts)


def _names() -> list[str]:
    """Return the names of core's commands and of those that plugins add."""
    group = get_command(app)
    return group.list_commands(Context(group))


def _help(name: str) -> str:
    done = CliRunner().invoke(
        app, [name, "--help"], prog_name="rlframework", env={"COLUMNS": _WIDTH, "TERMINAL_WIDTH": _WIDTH}
    )
    if done.exit_code:
        raise RuntimeError(f"rlframework {name} --help ended with {done.exit_code}: {done.output}")
    return "\n".join(line.rstrip() for line in done.output.strip("\n").splitlines())
