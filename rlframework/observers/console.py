"""Console output of a run: a live progress display on a terminal, plain lines otherwise.

Shows only well-known metrics; the other observers record all of them.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TextIO

from rlframework.plugins.hookspec import RunInfo, hookimpl

if TYPE_CHECKING:
    from rich.live import Live
    from rich.progress import Progress, TaskID
    from rich.text import Text

DISPLAYED_METRICS = (
    ("train/reward", "reward", ".3f"),
    ("train/accuracy", "accuracy", ".3f"),
    ("validation/accuracy", "validation accuracy", ".3f"),
    ("train/loss", "loss", ".4g"),
    ("train/kl", "KL", ".3g"),
)
"""Metric name, label and format."""
WINDOW = 20
"""Number of recent steps over which the pace is averaged."""
FIRST_INTERVAL, LAST_INTERVAL = 1.0, 10.0


class Pace:
    """Seconds per step, averaged over recent steps, and the remaining time."""

    def __init__(self, total: int, now: float) -> None:
        self._total = total
        self._marks: deque[tuple[int, float]] = deque([(0, now)], maxlen=WINDOW + 1)

    def mark(self, step: int, now: float) -> None:
        """Record that step `step` finished at `now` (seconds). Step 0 ends the preparation before the first step."""
        if step <= self._marks[-1][0]:
            self._marks.clear()
        self._marks.append((step, now))

    @property
    def seconds(self) -> float | None:
        """Seconds per step; None before two marks."""
        (first, started), (last, ended) = self._marks[0], self._marks[-1]
        return (ended - started) / (last - first) if last > first else None

    @property
    def remaining(self) -> float | None:
        """Seconds until the last step; None before two marks."""
        return None if self.seconds is None else self.seconds * max(self._total - self._marks[-1][0], 0)


class ConsoleObserver:
    """Shows the run's progress on stdout, or on `stream`. `clock` returns seconds."""

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = stream
        self._clock = clock
        self._view: PlainView | LiveView | None = None

    @hookimpl
    def rlframework_run_started(self, run: RunInfo) -> None:
        """Print the opening line, and choose the live display or plain lines."""
        stream = self._stream or sys.stdout
        algorithm = run.config.algorithm
        opening = f"{algorithm.name}: up to {algorithm.num_steps} steps, writing to {run.output_dir}"
        print(opening, file=stream, flush=True)
        live = stream.isatty() and os.environ.get("TERM") != "dumb"
        view = LiveView if live else PlainView
        self._view = view(algorithm.name, algorithm.num_steps, stream, self._clock)

    @hookimpl
    def rlframework_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step."""
        if self._view is not None:
            self._view.show(step, metrics)

    @hookimpl
    def rlframework_run_finished(self, metrics: Mapping[str, float]) -> None:
        """Print the duration and the final metrics."""
        if self._view is not None:
            self._view.finish(metrics)

    def close(self) -> None:
        """Restore the terminal."""
        if self._view is not None:
            self._view.stop()


class PlainView:
    """Prints a line per step, at intervals of some seconds; always for the first, the last, and validated steps."""

    def __init__(self, name: str, total: int, stream: TextIO, clock: Callable[[], float]) -> None:
        self._name, self._total, self._stream, self._clock = name, total, stream, clock
        self._began = clock()
        self._written = -math.inf
        self._step = 0
        self._pace = Pace(total, self._began)

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print a line for the step, unless the previous line was printed just before."""
        now = self._clock()
        self._step = step
        self._pace.mark(step, now)
        important = step <= 1 or step >= self._total or any(name.startswith("validation/") for name in metrics)
        if important or now - self._written >= self._interval(now):
            self._written = now
            self._print(f"step {step}/{self._total}", *describe(metrics), *resources(metrics), pace_text(self._pace))

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Print the closing line."""
        took = duration(self._clock() - self._began)
        self._print(f"{self._name} finished after {self._step} steps in {took}", *describe(metrics))

    def stop(self) -> None:
        """Do nothing: there is no display to end."""

    def _interval(self, now: float) -> float:
        return min(max((now - self._began) / 30.0, FIRST_INTERVAL), LAST_INTERVAL)

    def _print(self, *parts: str) -> None:
        print("  ".join(part for part in parts if part), file=self._stream, flush=True)


class LiveView:
    """A progress bar with pace and remaining time, above the latest value of each metric."""

    def __init__(self, name: str, total: int, stream: TextIO, clock: Callable[[], float]) -> None:
        self._name, self._total, self._clock = name, total, clock
        self._began = clock()
        self._step = 0
        self._pace = Pace(total, self._began)
        self._latest: dict[str, float] = {}
        self._live, self._progress, self._task, self._text = make_live(name, total, stream)
        self._live.start()

    def show(self, step: int, metrics: Mapping[str, float]) -> None:
        """Advance the bar and update the metrics."""
        self._step = step
        self._pace.mark(step, self._clock())
        self._latest.update(metrics)
        self._progress.update(self._task, completed=step, pace=pace_text(self._pace))
        self._text.plain = "  ".join([*describe(self._latest), *resources(self._latest)])
        self._live.refresh()

    def finish(self, metrics: Mapping[str, float]) -> None:
        """Keep the last state on the screen and print the closing line below it."""
        self.stop()
        took = duration(self._clock() - self._began)
        parts = [f"{self._name} finished after {self._step} steps in {took}", *describe(metrics)]
        self._live.console.print("  ".join(parts), highlight=False, markup=False)

    def stop(self) -> None:
        """End the display; idempotent."""
        self._live.stop()


def make_live(name: str, total: int, stream: TextIO) -> tuple[Live, Progress, TaskID, Text]:
    """Create the display, its progress bar and task, and the text for metrics. Imports rich."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.text import Text

    console = Console(file=stream)
    progress = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[pace]}"),
        console=console,
        expand=True,
    )
    task = progress.add_task(name, total=total, pace="")
    text = Text("", overflow="fold")
    return Live(Group(progress, text), console=console, refresh_per_second=2), progress, task, text


def describe(metrics: Mapping[str, float]) -> list[str]:
    """The displayed metrics among `metrics`, each as a label and a number."""
    return [f"{label} {metrics[name]:{form}}" for name, label, form in DISPLAYED_METRICS if name in metrics]


def resources(metrics: Mapping[str, float]) -> list[str]:
    """Throughput, and the peak memory of the worker with the highest peak, if `metrics` contain them."""
    tokens, memory = metrics.get("throughput/tokens_per_second"), metrics.get("memory/peak_mb")
    return [
        *([f"{tokens:,.0f} tokens/s"] if tokens else []),
        *([f"peak worker memory {memory:,.0f} MiB"] if memory else []),
    ]


def pace_text(pace: Pace) -> str:
    """The pace as `1.8 s/step, remaining 1m20s`; empty while it is unknown."""
    if pace.seconds is None or pace.remaining is None:
        return ""
    seconds = f"{pace.seconds:.2g}" if pace.seconds < 10 else f"{pace.seconds:.0f}"
    return f"{seconds} s/step, remaining {duration(pace.remaining)}"


def duration(seconds: float) -> str:
    """Format seconds as `8s`, `1m20s`, `2h05m` or `3d04h`."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"
