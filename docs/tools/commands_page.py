"""`commands.md`: what each command of `rlframework` says with `--help`."""

from __future__ import annotations

from pieces import page as page_of
from typer.main import get_command
from typer.testing import CliRunner

from rlframework.cli import app

_WIDTH = "100"
_TEXT = """Each takes `--debug`, before or after its name: errors then come with their traceback. Exit codes: 0; 2 for a
mistake in what was given, told in one message; 1 for any other failure; 130 for Ctrl-C."""


def page() -> str:
    """The page."""
    names = list(getattr(get_command(app), "commands", {}))
    parts = [part for name in names for part in (f"## `rlframework {name}`", f"```text\n{_help(name)}\n```")]
    return page_of("# Commands", _TEXT, *parts)


def _help(name: str) -> str:
    done = CliRunner().invoke(
        app, [name, "--help"], prog_name="rlframework", env={"COLUMNS": _WIDTH, "TERMINAL_WIDTH": _WIDTH}
    )
    if done.exit_code:
        raise RuntimeError(f"rlframework {name} --help ended with {done.exit_code}: {done.output}")
    return "\n".join(line.rstrip() for line in done.output.strip("\n").splitlines())
