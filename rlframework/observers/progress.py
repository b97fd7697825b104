"""Progress of a command with a known amount of work: a progress bar on a terminal, occasional lines otherwise."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

EVERY = 30.0
"""Seconds between lines."""

Progress = Callable[[int, int], None]
"""Called with the amount of work done and the total."""


class ProgressLines:
    """Writes `what: done of total, remaining time` to `stream`, at most every `every` seconds."""

    def __init__(
        self, what: str, stream: TextIO, *, every: float = EVERY, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._what, self._stream, self._every, self._clock = what, stream, every, clock
        self._started = self._printed = clock()

    def __call__(self, done: int, total: int) -> None:
        """Print a line if it is time."""
        now = self._clock()
        if now - self._printed < self._every:
            return
        self._printed = now
        left = f", {(now - self._started) / done * (total - done):.0f} s left" if 0 < done < total else ""
        print(f"{self._what}: {done:,} of {total:,}{left}", file=self._stream, flush=True)


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """Show the progress of `what` on stderr while the body runs; yields the function to call with the progress."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield ProgressLines(what, sys.stderr)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)
