"""Progress of a run (`ConsoleObserver`): a live display on a terminal, else occasional lines."""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import TextIO

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from rlframework.base.logs import printable
from rlframework.observers.run_environment import Resumed, read_environment
from rlframework.plugins.hookspec import RunInfo, hookimpl

DISPLAYED_METRICS = {
    "train/reward": "reward {:.3f}",
    "train/accuracy": "accuracy {:.3f}",
    "train/failed_fraction": "{:.0%} of the episodes failed",  # if any has
    "validation/accuracy": "validation accuracy {:.3f}",
    "validation/loss": "validation loss {:.4g}",  # if there is no accuracy
    "train/loss": "loss {:.4g}",
    "train/kl": "KL {:.3g}",
    "train/epoch": "epoch {:.2f}",
    "throughput/tokens_per_second": "{:,.0f} tokens/s",
    "throughput/tokens_per_second_per_worker": "{:,.0f} per worker",  # if there are several
    "throughput/mfu": "MFU {:.1%}",
    "memory/peak_mb": "peak worker memory {:,.0f} MiB",  # of the worker with the highest peak
}
PARTS = 4
"""Maximum number of the reward's parts in a line."""
FEW = 20
"""Number of validation samples below which it is shown beside their accuracy."""
WINDOW = 20
"""Number of recent steps over which the pace is averaged."""
FIRST_INTERVAL, LAST_INTERVAL = 1.0, 10.0
"""Seconds between lines of a run at its beginning, and after five minutes."""

Clock = Callable[[], float]
"""Returns seconds."""


class Pace:
    """Seconds per step, averaged over recent steps, and the remaining time; as text, empty before the second mark."""

    def __init__(self, total: int, now: float, after_step: int = 0) -> None:
        self._total = total
        self._marks: deque[tuple[int, float]] = deque([(after_step, now)], maxlen=WINDOW + 1)

    def mark(self, step: int, now: float) -> None:
        """Record that step `step` finished at `now` (seconds). Step 0 ends the preparation before the first step."""
        if step <= self._marks[-1][0]:
            self._marks.clear()
        self._marks.append((step, now))

    def __str__(self) -> str:
        (first, started), (last, ended) = self._marks[0], self._marks[-1]
        if last <= first:
            return ""
        seconds = (ended - started) / (last - first)
        shown = f"{seconds:.2g}" if seconds < 10 else f"{seconds:.0f}"
        return f"{shown} s/step, remaining {duration(seconds * max(self._total - last, 0))}"


class ConsoleObserver:
    """Shows the run's progress on stdout, or on `stream`: a live display on a terminal, otherwise lines.

    Lines appear at intervals of some seconds, and always for the first, the last, and validated steps.
    """

    def __init__(self, stream: TextIO | None = None, clock: Clock = time.monotonic) -> None:
        self._stream = stream or sys.stdout
        self._clock = clock
        self._display: _Display | None = None
        self._step = 0
        self._latest: Mapping[str, float] = {}
        self._failed: list[float] = []
        self._best_metric = ""

    @hookimpl
    def rlframework_run_started(self, run: RunInfo) -> None:
        """Print the opening lines, and start the live display on a terminal."""
        self._name, self._total = run.config.algorithm.name, run.config.algorithm.num_steps
        self._best_metric = run.config.checkpoints.metric
        self._print(f"{self._name}: up to {_steps(self._total)}, writing to {run.output_dir}")
        after_step = 0
        if (found := read_environment(run.output_dir).get("resumed")) is not None:
            resumed = Resumed.model_validate(found)
            self._print(str(resumed))
            after_step = resumed.after_step
        if every := run.config.checkpoints.every:
            steps = "every step" if every == 1 else f"every {every} steps"
            self._print(f"a checkpoint {steps}; to resume: {run.config.resume_command}")
        self._began, self._printed = self._clock(), -math.inf
        self._pace = Pace(self._total, self._began, after_step)
        if self._stream.isatty() and os.environ.get("TERM") != "dumb":
            self._display = _Display(self._name, self._total, self._best_metric, self._stream)

    @hookimpl
    def rlframework_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the step, unless the previous line was printed just before."""
        now = self._clock()
        self._step, self._latest = step, metrics
        if "train/failed_fraction" in metrics:
            self._failed.append(metrics["train/failed_fraction"])
        self._pace.mark(step, now)
        if self._display is not None:
            self._display.show(step, self._pace, metrics)
            return
        important = step <= 1 or step >= self._total or any(name.startswith("validation/") for name in metrics)
        interval = min(max((now - self._began) / 30.0, FIRST_INTERVAL), LAST_INTERVAL)
        if important or now - self._printed >= interval:
            self._printed = now
            self._print(f"step {step}/{self._total}", *describe(metrics, self._best_metric), str(self._pace))

    @hookimpl
    def rlframework_run_finished(self, metrics: Mapping[str, float]) -> None:
        """Print the duration and the final metrics, below the last state of the display.

        The parts of the reward are those of the last step, and failed episodes are counted over all steps.
        """
        self.close()
        metrics = _with_parts_of(self._latest, metrics)
        if self._failed:
            metrics["train/failed_fraction"] = sum(self._failed) / len(self._failed)
        took = duration(self._clock() - self._began)
        self._print(
            f"{self._name} finished after {_steps(self._step)} in {took}", *describe(metrics, self._best_metric)
        )

    def close(self, state: str = "finished") -> None:
        """Restore the terminal. Idempotent."""
        if self._display is not None:
            self._display.stop()

    def _print(self, *parts: str) -> None:
        print(printable("  ".join(part for part in parts if part)), file=self._stream, flush=True)


class _Display(Progress):
    """A progress bar with pace and remaining time, above the latest value of each metric."""

    def __init__(self, name: str, total: int, best_metric: str, stream: TextIO) -> None:
        self._metrics: dict[str, float] = {}
        self._best_metric = best_metric
        columns = (TextColumn("{task.description}"), BarColumn(bar_width=None), MofNCompleteColumn(),
                   TimeElapsedColumn(), TextColumn("{task.fields[pace]}"))  # fmt: skip
        super().__init__(*columns, console=Console(file=stream), expand=True, refresh_per_second=2)
        self._bar = self.add_task(name, total=total, pace="")
        self.start()

    def get_renderables(self) -> Iterator[RenderableType]:
        yield from super().get_renderables()
        yield Text("  ".join(describe(self._metrics, self._best_metric)), overflow="fold")

    def show(self, step: int, pace: Pace, metrics: Mapping[str, float]) -> None:
        self._metrics = _with_parts_of(metrics, {**self._metrics, **metrics})
        self.update(self._bar, completed=step, pace=str(pace), refresh=True)


def describe(metrics: Mapping[str, float], best_metric: str = "") -> list[str]:
    """Those of `metrics` that are displayed, as text; also `best_metric`, which chooses the best checkpoint."""
    shown = {name: metrics[name] for name in DISPLAYED_METRICS if name in metrics}
    if shown.get("throughput/tokens_per_second_per_worker") == shown.get("throughput/tokens_per_second"):
        shown.pop("throughput/tokens_per_second_per_worker", None)
    if not shown.get("train/failed_fraction"):
        shown.pop("train/failed_fraction", None)
    if "validation/accuracy" in shown:
        shown.pop("validation/loss", None)
    texts = [DISPLAYED_METRICS[name].format(value) + _more(name, metrics) for name, value in shown.items()]
    if best_metric in metrics and best_metric not in shown:
        texts.append(f"{best_metric} {metrics[best_metric]:.4g}")
    return texts


def _with_parts_of(step: Mapping[str, float], latest: Mapping[str, float]) -> dict[str, float]:
    """`latest` without those parts of the reward that `step` does not have: they are of earlier steps."""
    return {name: value for name, value in latest.items() if name in step or not name.startswith("train/reward/")}


def _more(name: str, metrics: Mapping[str, float]) -> str:
    """The number of validation samples of an accuracy, if they are few; or the parts of a reward that has several."""
    if name == "validation/accuracy" and metrics.get("validation/samples", FEW) < FEW:
        return f" of {metrics['validation/samples']:.0f}"
    parts = [each for each in metrics if each.startswith(f"{name}/")] if name == "train/reward" else []
    if name == "train/reward" and "train/model_score" in metrics:
        parts = ["train/model_score", *(parts or ["train/environment_reward"])]
    texts = [f"{each.removeprefix('train/').removeprefix('reward/')} {metrics[each]:.3g}" for each in parts[:PARTS]]
    return f" ({', '.join(texts)}{', ...' if len(parts) > PARTS else ''})" if len(parts) > 1 else ""


def _steps(count: int) -> str:
    return "1 step" if count == 1 else f"{count} steps"


def duration(seconds: float) -> str:
    """Format seconds as `8s`, `1m20s`, `2h05m` or `3d04h`."""
    whole = round(seconds)
    for unit, large, small, part in ((86400, "d", "h", 3600), (3600, "h", "m", 60), (60, "m", "s", 1)):
        if whole >= unit:
            return f"{whole // unit}{large}{whole % unit // part:02d}{small}"
    return f"{whole}s"
