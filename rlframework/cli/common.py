"""Shared by all commands: the application, common options, error reporting and table output."""

from __future__ import annotations

import difflib
import errno
import logging
import os
import re
import sys
import traceback
from collections.abc import Collection, Sequence
from functools import cached_property
from io import TextIOWrapper
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperGroup

from rlframework import __version__
from rlframework.base.errors import PluginError, RLFrameworkError, UserError, WriteError
from rlframework.base.files import writing
from rlframework.base.logs import LEVELS, log_to_stderr, printable, set_log_level
from rlframework.base.secrets import hide_in_text

if TYPE_CHECKING:
    from rlframework.plugins.hook_calls import Hook
    from rlframework.plugins.manager import PluginManager

_LOG = logging.getLogger(__name__)

_NO_TEXT = re.compile("[\0\ud800-\udfff]")
_WRONG_PATH = (errno.ENAMETOOLONG, errno.ELOOP, errno.ENOTDIR, errno.EISDIR)
_NARROWEST, _WIDEST = 20, 1000
"""Columns of a table, whatever COLUMNS says."""
_ELSEWHERE = 120
"""Columns of a table where there is no terminal: in logs."""


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line, the entry point of `rlframework`. Always raises `SystemExit`."""
    for stream in (sys.stdout, sys.stderr):  # None if closed
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a locale need not have all characters
    words = sys.argv[1:] if args is None else list(args)
    try:
        if wrong := next(filter(_NO_TEXT.search, words), None):
            raise UserError(f"the argument {wrong[:80]!a} is not text in this locale's encoding: write it in UTF-8")
        log_to_stderr()
        with writing(None):
            app(args=words, prog_name="rlframework")
    except (OSError, UserError, WriteError) as error:  # not of a command: of its arguments, or of printing help
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2 if isinstance(error, UserError) else 1) from None


class _Group(TyperGroup):
    """Core's commands and those of plugins. Turns exceptions of commands into a message and an exit code."""

    @cached_property
    def _manager(self) -> PluginManager:
        from rlframework.plugins.manager import create_manager

        return create_manager()

    @cached_property
    def _of_plugins(self) -> dict[str, Any]:
        """Collected when a command that core does not have, or the list of all is asked for.

        So a plugin that is broken, slow or in conflict with another never disturbs core's commands.
        """
        return collect_commands(self._manager, self.commands)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name, or None."""
        return super().get_command(ctx, cmd_name) or self._of_plugins.get(cmd_name)

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands: first core's."""
        return [*super().list_commands(ctx), *self._of_plugins]

    def resolve_command(self, ctx: Any, args: list[str]) -> tuple[str | None, Any, list[str]]:
        """Find the command that `args` begins with. Raises `UserError` if there is none."""
        name = args[0]
        if not name.startswith("-") and self.get_command(ctx, name) is None:
            near = difflib.get_close_matches(name, self.list_commands(ctx), n=1)
            added = f"Plugins add commands: {self._manager.how_to_get(name)}"
            raise UserError(f"there is no command {name!r}. {f'Did you mean {near[0]!r}?' if near else added}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command of `ctx`."""
        try:
            with writing(None):
                return super().invoke(ctx)
        except KeyboardInterrupt as error:
            _report(str(error) or "interrupted", error, ctx)
            raise typer.Exit(getattr(error, "exit_code", 130)) from None
        except RLFrameworkError as error:
            _report(f"error: {error}", error, ctx)
            raise typer.Exit(2 if isinstance(error, UserError) else 1) from None
        except Exception as error:
            if isinstance(error, OSError) and error.errno in _WRONG_PATH and error.filename is not None:
                _report(f"error: cannot use the path {error.filename!r}: {error.strerror}", error, ctx)
                raise typer.Exit(2) from None
            if type(error).__module__.partition(".")[0] in ("typer", "click") or isinstance(error, BrokenPipeError):
                raise  # typer reports bad arguments and a closed output pipe itself
            hint = "This is an unexpected error. Use --debug to show the traceback."
            _report(f"error: {type(error).__name__}: {error}\nin {_place(error)}\n{hint}", error, ctx)
            raise typer.Exit(1) from None


def _place(error: BaseException) -> str:
    """Return the file, the line and the function that raised `error`."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{last.filename}:{last.lineno}, {last.name}"


def _report(message: str, error: BaseException, ctx: Any) -> None:
    if ctx.find_root().meta.get(_DEBUG):
        message = f"{''.join(traceback.format_exception(error))}{message}"
    print(printable(hide_in_text(message)), file=sys.stderr)


_DEBUG = "rlframework.debug"


def _set_debug(ctx: typer.Context, value: bool) -> bool:
    """Accept the option before or after the name of the command."""
    if value:
        ctx.find_root().meta[_DEBUG] = True
    return value


def _set_log_level(value: str | None) -> None:
    if value is not None:
        set_log_level(value)


def _show_version(value: bool) -> None:
    if value:
        print(f"rlframework {__version__}")
        raise typer.Exit


Config = Annotated[str, Argument(help="YAML file that configures the run.")]
Overrides = Annotated[
    list[str] | None, Argument(help="Settings to override, such as policy.backend=dtensor; ~a.b removes a key.")
]
OldOverrides = Annotated[
    list[str] | None, Option("--set", metavar="a.b=value", hidden=True, help="Accepted until the next release.")
]
TrustRun = Annotated[
    bool,
    Option("--trust-run", help="Let the run's own files decide what runs code (see SECURITY.md); not for downloads."),
]
Json = Annotated[bool, Option("--json", help="Print JSON.")]
Debug = Annotated[bool, Option("--debug", help="Show the traceback of an error.", callback=_set_debug)]
LogLevel = Annotated[
    str | None,
    Option(
        "--log-level",
        metavar="LEVEL",
        help=f"Show messages from this level: {', '.join(LEVELS)}. RLFRAMEWORK_LOG_LEVEL sets it too.",
        callback=_set_log_level,
        is_eager=True,
    ),
]
Version = Annotated[bool, Option("--version", help="Print the version.", callback=_show_version, is_eager=True)]

app = typer.Typer(
    cls=_Group, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


@app.callback()
def root(debug: Debug = False, log_level: LogLevel = None, version: Version = False) -> None:
    """RL post-training of language models, with pluggable training backends."""


def with_old_overrides(overrides: Sequence[str], old: Sequence[str] | None) -> list[str]:
    """`overrides` and those that were written with `--set`, as `generate` and `serve` took them; warns of these."""
    if old:
        _LOG.warning("warning: --set will be removed: write %s without it, as for the other commands", " ".join(old))
    return [*overrides, *(old or ())]


def print_table(table: Any) -> None:
    """Print a rich table as wide as the terminal, also into a pipe, or as COLUMNS; without either, `_ELSEWHERE`."""
    from rich.console import Console

    known = os.environ.get("COLUMNS") or any(map(os.isatty, range(3)))
    width = Console().width if known else _ELSEWHERE
    Console(width=min(max(width, _NARROWEST), _WIDEST)).print(table)


def collect_commands(manager: PluginManager, reserved: Collection[str]) -> dict[str, Any]:
    """Return the commands of all active plugins by name. Two plugins may not share a name, nor take a `reserved` one.

    The command of a shared name raises a `PluginError` that names both; other problems are warnings.
    """
    commands: dict[str, Any] = {}
    owners: dict[str, list[str]] = {}
    for plugin, added in manager.call("rlframework_commands", _commands):
        for name, command in added.items():
            if name in reserved:
                _LOG.warning("warning: the command %r of %s is ignored: core has one of that name", name, plugin)
                continue
            owners.setdefault(name, []).append(str(plugin))
            commands[name] = command if len(owners[name]) == 1 else _conflict(name, owners[name])
    return commands


def _commands(hook: Hook) -> dict[str, Any]:
    """The commands of one plugin by name."""
    app = typer.Typer(rich_markup_mode=None)
    app.callback()(lambda: None)  # without it, one command alone would be no group
    hook(app=app)
    commands: dict[str, Any] = getattr(typer.main.get_command(app), "commands")  # noqa: B009 - typed as a command
    return commands


def _conflict(name: str, owners: Sequence[str]) -> Any:
    from rlframework.plugins.discovery import DISABLE_VARIABLE

    app = typer.Typer(rich_markup_mode=None)

    @app.command(name, context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
    def conflict() -> None:
        """More than one plugin adds this command."""
        raise PluginError(
            f"{len(owners)} plugins add the command {name!r}: {' and '.join(owners)}. Uninstall all but one, or add "
            f"the distributions of the others to {DISABLE_VARIABLE}."
        )

    return typer.main.get_command(app)
