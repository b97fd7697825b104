"""Plots a run's training curves as a PNG: reward and accuracy at the top, loss and KL of each phase below.

The picture is static and may show several consecutive phases (supervised warm-up, then GRPO). To compare runs, see
`rlframework.observers.report`. Matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from rlframework.files import write_atomically
from rlframework.observers.jsonl import METRICS_FILE, History, add_row, read_history, seconds_of, series
from rlframework.plugins.hookspec import RunInfo, hookimpl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#22272e", "#6b7480", "#e4e7eb"
STYLE: dict[Any, Any] = {
    "axes.axisbelow": True, "axes.edgecolor": MUTED, "axes.grid": True, "axes.labelcolor": INK,
    "axes.spines.right": False, "axes.spines.top": False, "axes.titlecolor": INK, "axes.titlelocation": "left",
    "axes.titlesize": 10, "figure.constrained_layout.use": True, "font.size": 9, "grid.color": GRID,
    "legend.edgecolor": GRID, "text.color": INK, "text.parse_math": False, "xtick.color": MUTED, "ytick.color": MUTED,
}  # fmt: skip
"""The style of all pictures of runs, to be set with `matplotlib.rc_context` while a figure is made and saved."""

REWARD, ACCURACY = "#1f6fb4", "#d1621b"
PANELS = (("train/loss", "loss", "#4a5568"), ("train/kl", "KL to reference (nats/token)", "#7b4fa3"))
"""Metric, label and colour of the panels below the main one."""


@dataclass(frozen=True)
class Phase:
    """A history and its range on the shared horizontal axis; `at[i]` is the position of row i within the phase."""

    label: str
    history: History
    at: Sequence[float]
    start: float
    length: float

    def series(self, name: str, start: float | None = None) -> tuple[list[float], list[float]]:
        """Positions (on the shared axis, or from `start`) and values of a metric."""
        at, values = series(self.history, name, self.at)
        return [(self.start if start is None else start) + place for place in at], values


class CurveObserver:
    """Draws `curve.png` in the run's directory when the run finishes."""

    def __init__(self) -> None:
        self._rows: list[dict[str, float]] = []

    @hookimpl
    def rlframework_run_started(self, run: RunInfo) -> None:
        """Load the metrics of a resumed run from `metrics.jsonl`."""
        path = run.output_dir / METRICS_FILE
        self._rows = read_history(path) if path.is_file() else []

    @hookimpl
    def rlframework_step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """Store the step's metrics, replacing those of this and later steps before a resume."""
        add_row(self._rows, {"step": float(step), **metrics})

    @hookimpl
    def rlframework_run_finished(self, run: RunInfo) -> None:
        """Draw the stored metrics."""
        algorithm, environment = run.config.algorithm.name, run.config.environment.name
        draw_curve([(algorithm, self._rows)], run.output_dir / "curve.png", f"{algorithm} on {environment}")


def draw_curve(
    histories: Sequence[tuple[str, History]],
    path: Path | str,
    title: str,
    *,
    along: Literal["steps", "seconds"] = "steps",
) -> Path:
    """Write a PNG of `histories` (pairs of label and rows of metrics, in chronological order) to `path`; return `path`.

    Rows map metric names to values, with `step` if it is known. With `along="seconds"`, the horizontal axis is the
    cumulative sum of `time/step`. Missing metrics and non-finite values are skipped.
    """
    from matplotlib import rc_context

    with rc_context(STYLE):
        return write_png(draw_phases(phases_of(histories, along), title, along), Path(path))


def write_png(figure: Figure, path: Path) -> Path:
    """Write `figure` to `path`, replacing the file at once; return `path`."""
    picture = io.BytesIO()
    figure.savefig(picture, format="png", dpi=130)
    write_atomically(path, picture.getvalue())
    return path


def phases_of(histories: Sequence[tuple[str, History]], along: str) -> list[Phase]:
    """Arrange `histories` one after another. A row without a `step` has its index in the history plus 1."""
    phases: list[Phase] = []
    start = 0.0
    for label, history in histories:
        if along == "seconds":
            at = seconds_of(history)
        else:
            at = [float(row.get("step", index)) for index, row in enumerate(history, start=1)]
        phases.append(Phase(label, history, at, start, max(at, default=0.0)))
        start += phases[-1].length
    return phases


def draw_phases(phases: Sequence[Phase], title: str, along: str) -> Figure:
    """A figure with one main plot of all phases, and panels below for the metrics of `PANELS` that they have."""
    from matplotlib.figure import Figure

    panels = [(phase, *panel) for phase in phases for panel in PANELS if len(phase.series(panel[0])[0]) > 1]
    figure = Figure(figsize=(10.0, 7.2 if panels else 5.0))
    grid = figure.add_gridspec(2 if panels else 1, max(len(panels), 1), height_ratios=(2, 1) if panels else None)
    _draw_main(figure.add_subplot(grid[0, :]), phases)
    for column, (phase, name, text, colour) in enumerate(panels):
        axes = figure.add_subplot(grid[1, column])
        _draw_smoothed(axes, *phase.series(name, start=0.0), colour, text)
        axes.set_title(f"{phase.label}: {text}" if len(phases) > 1 else text)
    for axes in figure.axes:
        axes.set_xlabel("step" if along == "steps" else "training time (s)")
        axes.locator_params("x", nbins=8, integer=along == "steps")
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    return figure


def _draw_main(axes: Axes, phases: Sequence[Phase]) -> None:
    from matplotlib.ticker import PercentFormatter

    rewards = [phase.series("train/reward") for phase in phases]
    shared = all(0.0 <= value <= 1.0 for _, values in rewards for value in values)
    right = axes if shared else axes.twinx()
    for phase, reward in zip(phases, rewards, strict=True):
        accuracy = phase.series("train/accuracy")
        same = reward == accuracy
        _draw_smoothed(axes, *reward, REWARD, "training reward (= accuracy)" if same else "training reward")
        if not same:
            _draw_smoothed(right, *accuracy, ACCURACY, "training accuracy")
        _draw_validation(right, phase, first=phase is phases[0], last=phase is phases[-1])
    largest = max((np.max(line.get_ydata()) for line in right.get_lines()), default=1.0)
    top = 2.0 * largest if 0.0 < largest < 0.25 else 1.0  # small fractions fill the plot, with room for the legend
    right.set_ylim(-0.03 * top, 1.08 * top)
    right.yaxis.set_major_formatter(PercentFormatter(xmax=1.0, decimals=0))
    axes.set_ylabel("reward, accuracy" if shared else "reward")
    axes.set_xlim(0.0, max(sum(phase.length for phase in phases), 1.0) * 1.02)
    if not shared:
        right.set_ylabel("accuracy")
        right.spines["right"].set_visible(True)
        right.grid(False)
    for phase in phases:
        if phase.start:
            axes.axvline(phase.start, color=MUTED, linewidth=1.0, zorder=1)
        if phase.label and phase.length:
            axes.annotate(phase.label, (phase.start, 1.0), xycoords=("data", "axes fraction"), xytext=(5, -5),
                          textcoords="offset points", va="top", color=MUTED, fontweight="bold")  # fmt: skip
    lines = [line for each in (axes, right) for line in each.get_legend_handles_labels()[0]]
    entries = {str(line.get_label()): line for line in lines}
    if entries:
        right.legend(entries.values(), entries.keys(), loc="best", framealpha=0.9)


def _draw_validation(axes: Axes, phase: Phase, *, first: bool, last: bool) -> None:
    """Draw the accuracies on held-out data, with numbers at the ends."""
    at, values = phase.series("validation/accuracy")
    if not at:
        return
    axes.plot(at, values, color=ACCURACY, linewidth=1.2, linestyle=(0, (4, 2)), marker="o", markersize=6,
              markeredgecolor="white", zorder=5, clip_on=False, label="validation accuracy (held out)")  # fmt: skip
    labels = [(-1, (0, 8) if last else (-7, 6), "center" if last else "right")]
    if first and len(at) > 1:
        labels.append((0, (7, 6), "left"))
    for index, offset, side in labels:
        axes.annotate(f"{values[index]:.0%}", (at[index], values[index]), xytext=offset, textcoords="offset points",
                      ha=side, color=ACCURACY, fontweight="bold", zorder=6)  # fmt: skip


def _draw_smoothed(axes: Axes, at: Sequence[float], values: Sequence[float], colour: str, text: str) -> None:
    """Draw a line of means over a tenth of the values, centred; and the values themselves, faintly."""
    if not at:
        return
    window = 2 * max(len(values) // 20, 1) + 1 if len(values) >= 8 else 1
    if window > 1:
        axes.plot(at, values, color=colour, linewidth=0.8, alpha=0.3, zorder=2)
    axes.plot(at, smooth(values, window), color=colour, linewidth=1.8, zorder=3, label=text)


def smooth(values: Sequence[float], window: int) -> np.ndarray[Any, Any]:
    """Centred moving average over `window` (odd, at most all) values, truncated at both ends."""
    ones = np.ones(window)
    return np.convolve(values, ones, "same") / np.convolve(np.ones(len(values)), ones, "same")
