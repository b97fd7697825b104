"""The progress of a command on the terminal, and the new folder that it writes."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from rlframework.base.errors import UserError
from rlframework.base.files import check_writable
from rlframework.base.logs import ProgressCallback
from rlframework.observers.console import Clock

EVERY = 30.0
"""Seconds between lines of progress."""


@contextmanager
def progress_bar(what: str, clock: Clock = time.monotonic) -> Iterator[ProgressCallback]:
    """Show the progress of `what` on stderr while the body runs; without a terminal, a line every `EVERY` seconds.

    Yields the function to call with the amount of work done and the total.
    """
    console, started = Console(stderr=True), clock()
    printed = started

    def print_line(done: int, total: int) -> None:
        nonlocal printed
        now = clock()
        if now - printed >= EVERY:
            printed = now
            left = f", {(now - started) / done * (total - done):.0f} s left" if 0 < done < total else ""
            print(f"{what}: {done:,} of {total:,}{left}", file=sys.stderr, flush=True)

    if not console.is_terminal:
        yield print_line
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def check_new_folder(folder: Path, given: str) -> None:
    """Raise `UserError` if `folder` is not writable or not empty; the message begins with `given`."""
    try:
        check_writable(folder)
    except UserError as error:
        raise UserError(f"{given}: {error}") from error
    if folder.exists() and any(folder.iterdir()):
        raise UserError(
            f"{given}: the folder is not empty, and nothing is overwritten. Give another folder, or empty this one"
        )
