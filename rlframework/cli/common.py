"""What all commands share: the application, its options, how errors are told, and how a table is printed."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rlframework import __version__
from rlframework.errors import RLFrameworkError, UserError


def main(args: Sequence[str] | None = None) -> None:
    """The entry point `rlframework`. Ends with `SystemExit`."""
    app(args=list(args) if args is not None else None, prog_name="rlframework")


class _Group(TyperGroup):
    """Turns what commands raise into a message and an exit code."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command of `ctx`."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt as error:
            _tell(str(error) or "interrupted", error, ctx)
            raise typer.Exit(getattr(error, "exit_code", 130)) from None
        except RLFrameworkError as error:
            _tell(f"error: {error}", error, ctx)
            raise typer.Exit(2 if isinstance(error, UserError) else 1) from None
        except Exception as error:
            if type(error).__module__.partition(".")[0] in ("typer", "click") or isinstance(error, BrokenPipeError):
                raise  # bad arguments, and the end of the output's reader: typer's to tell
            name = type(error).__name__
            _tell(f"error: {name}: {error}\nThis was not expected. --debug shows where it happened.", error, ctx)
            raise typer.Exit(1) from None


def _tell(message: str, error: BaseException, ctx: Any) -> None:
    if ctx.find_root().meta.get(_DEBUG):
        traceback.print_exception(error)
    print(message, file=sys.stderr)


_DEBUG = "rlframework.debug"


def _set_debug(ctx: typer.Context, value: bool) -> bool:
    """Before the command's name and after it: either one counts."""
    if value:
        ctx.find_root().meta[_DEBUG] = True
    return value


def _show_version(value: bool) -> None:
    if value:
        print(f"rlframework {__version__}")
        raise typer.Exit


Config = Annotated[str, typer.Argument(help="A YAML file.", show_default=False)]
Overrides = Annotated[list[str] | None, typer.Argument(help="Such as policy.backend=dtensor; ~a.b takes a key out.")]
Out = Annotated[str, typer.Argument(help="A folder that is not there yet.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks of errors.", callback=_set_debug)]
Version = Annotated[
    bool, typer.Option("--version", help="Print the version and exit.", callback=_show_version, is_eager=True)
]

app = typer.Typer(
    cls=_Group, no_args_is_help=True, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)


@app.callback()
def root(debug: Debug = False, version: Version = False) -> None:
    """RL post-training of language models, with the training backend as a plugin."""


def print_table(table: Any) -> None:
    """Print a table of rich, 200 characters wide where nobody looks at a terminal."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console = Console(width=200)
    console.print(table)
