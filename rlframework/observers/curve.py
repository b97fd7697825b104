"""Plots a run's training curves as a PNG: reward and accuracy at the top, loss and KL of each phase below.

The picture is static and may show several consecutive phases (supervised warm-up, then GRPO). To compare runs, see
`rlframework.observers.report`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlframework.files import write_atomically
from rlframework.observers.jsonl import METRICS_FILE, read_history
from rlframework.observers.series import History, last_step, seconds_of, series, smooth, step_of
from rlframework.plugins.hookspec import RunInfo, hookimpl

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, GRID = "#22272e", "#6b7480", "#e4e7eb"
REWARD, ACCURACY, LOSS, KL = "#1f6fb4", "#d1621b", "#4a5568", "#7b4fa3"
TRAINING_REWARD, TRAINING_ACCURACY, VALIDATION_ACCURACY = "train/reward", "train/accuracy", "validation/accuracy"
BELOW = (("train/loss", "loss", LOSS), ("train/kl", "KL to reference (nats/token)", KL))


@dataclass(frozen=True)
class Phase:
    """A history and its range on the shared horizontal axis; `at[i]` is the position of row i within the phase."""

    label: str
    history: History
    at: Sequence[float]
    start: float
    length: float


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
        while self._rows and self._rows[-1]["step"] > step:
            self._rows.pop()
        if self._rows and self._rows[-1]["step"] == step:
            self._rows[-1].update(metrics)
        else:
            self._rows.append({"step": float(step), **metrics})

    @hookimpl
    def rlframework_run_finished(self, run: RunInfo) -> None:
        """Draw the stored metrics."""
        algorithm, environment = run.config.algorithm.name, run.config.environment.name
        draw_curve([(algorithm, self._rows)], run.output_dir / "curve.png", f"{algorithm} on {environment}")

    def close(self) -> None:
        """Do nothing: there are no open files."""


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
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    phases = _phases(histories, along)
    with rc_context({"font.size": 10, "axes.edgecolor": MUTED, "axes.labelcolor": INK, "text.color": INK,
                     "xtick.color": MUTED, "ytick.color": MUTED, "axes.titlecolor": INK}):  # fmt: skip
        figure = _figure(phases, title, along)
        picture = io.BytesIO()
        FigureCanvasAgg(figure)
        figure.savefig(picture, format="png", dpi=130)
    path = Path(path)
    write_atomically(path, picture.getvalue())
    return path


def _phases(histories: Sequence[tuple[str, History]], along: str) -> list[Phase]:
    phases: list[Phase] = []
    start = 0.0
    for label, history in histories:
        if along == "seconds":
            at: list[float] = seconds_of(history)
            length = at[-1] if at else 0.0
        else:
            at = [float(step_of(row, index)) for index, row in enumerate(history)]
            length = float(last_step(history))
        phases.append(Phase(label, history, at, start, length))
        start += length
    return phases


def _figure(phases: Sequence[Phase], title: str, along: str) -> Figure:
    from matplotlib.figure import Figure

    panels = [
        (phase, name, text, colour)
        for phase in phases
        for name, text, colour in BELOW
        if len(series(phase.history, name, phase.at)[0]) > 1
    ]
    figure = Figure(figsize=(10.0, 7.2 if panels else 5.0), layout="constrained")
    grid = figure.add_gridspec(2 if panels else 1, max(len(panels), 1), height_ratios=(2, 1) if panels else None)
    _draw_top(figure.add_subplot(grid[0, :]), phases, along)
    for column, (phase, name, text, colour) in enumerate(panels):
        of = f"{phase.label}: " if len(phases) > 1 else ""
        _draw_panel(figure.add_subplot(grid[1, column]), phase, name, of + text, colour, along)
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    return figure


def _draw_top(axes: Axes, phases: Sequence[Phase], along: str) -> None:
    _style_axes(axes, along)
    rewards = [value for phase in phases for value in series(phase.history, TRAINING_REWARD, phase.at)[1]]
    shared = all(0.0 <= value <= 1.0 for value in rewards)
    right = axes if shared else axes.twinx()
    for index, phase in enumerate(phases):
        reward = series(phase.history, TRAINING_REWARD, phase.at)
        accuracy = series(phase.history, TRAINING_ACCURACY, phase.at)
        if reward == accuracy:
            _line(axes, *reward, REWARD, "training reward (= accuracy)", phase.start)
        else:
            _line(axes, *reward, REWARD, "training reward", phase.start)
            _line(right, *accuracy, ACCURACY, "training accuracy", phase.start)
        _draw_validation(right, phase, first=index == 0, last=index == len(phases) - 1)
    top = _top([line.get_ydata() for line in right.get_lines()])
    right.set_ylim(-0.03 * top, 1.08 * top)
    right.yaxis.set_major_formatter(_percent())
    if not shared:
        right.spines[["top", "left"]].set_visible(False)
        right.set_ylabel("accuracy")
    axes.set_ylabel("reward, accuracy" if shared else "reward")
    axes.set_xlim(0.0, max(sum(phase.length for phase in phases), 1.0) * 1.02)
    _mark_phases(axes, phases)
    _legend(axes, right)


def _top(drawn: Sequence[Any]) -> float:
    """The upper limit of the axis: 1, or for small fractions twice the largest, which leaves room for the legend."""
    largest = max((float(value) for values in drawn for value in values if math.isfinite(value)), default=1.0)
    return 2.0 * largest if 0.0 < largest < 0.25 else 1.0


def _legend(axes: Axes, right: Axes) -> None:
    entries = {
        text: handle for part in (axes, right) for handle, text in zip(*part.get_legend_handles_labels(), strict=True)
    }
    if entries:
        right.legend(entries.values(), entries.keys(), loc="best", framealpha=0.9, edgecolor=GRID)


def _draw_validation(axes: Axes, phase: Phase, *, first: bool, last: bool) -> None:
    at, values = series(phase.history, VALIDATION_ACCURACY, phase.at)
    if not at:
        return
    places = [phase.start + place for place in at]
    axes.plot(places, values, color=ACCURACY, linewidth=1.2, linestyle=(0, (4, 2)), marker="o", markersize=6,
              markeredgecolor="white", zorder=5, clip_on=False, label="validation accuracy (held out)")  # fmt: skip
    if first and len(at) > 1:
        _mark_share(axes, places[0], values[0], (7, 6), "left")
    _mark_share(axes, places[-1], values[-1], (0, 8) if last else (-7, 6), "center" if last else "right")


def _mark_share(axes: Axes, place: float, value: float, offset: tuple[float, float], side: str) -> None:
    axes.annotate(f"{value:.0%}", (place, value), xytext=offset, textcoords="offset points", ha=side, color=ACCURACY,
                  fontweight="bold", zorder=6)  # fmt: skip


def _mark_phases(axes: Axes, phases: Sequence[Phase]) -> None:
    for index, phase in enumerate(phases):
        if index:
            axes.axvline(phase.start, color=MUTED, linewidth=1.0, zorder=1)
        if phase.label and phase.length:
            axes.annotate(phase.label, (phase.start, 1.0), xycoords=("data", "axes fraction"), xytext=(5, -5),
                          textcoords="offset points", va="top", color=MUTED, fontweight="bold")  # fmt: skip


def _draw_panel(axes: Axes, phase: Phase, name: str, text: str, colour: str, along: str) -> None:
    _style_axes(axes, along)
    _line(axes, *series(phase.history, name, phase.at), colour, text, 0.0)
    axes.set_title(text, fontsize=10, loc="left")


def _line(axes: Axes, at: Sequence[float], values: Sequence[float], colour: str, text: str, start: float) -> None:
    if not at:
        return
    places = [start + place for place in at]
    window = 2 * max(len(values) // 20, 1) + 1 if len(values) >= 8 else 1
    if window > 1:
        axes.plot(places, values, color=colour, linewidth=0.8, alpha=0.3, zorder=2)
    axes.plot(places, smooth(values, window), color=colour, linewidth=1.8, zorder=3, label=text)


def _percent() -> Any:
    from matplotlib.ticker import PercentFormatter

    return PercentFormatter(xmax=1.0, decimals=0)


def _style_axes(axes: Axes, along: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel("step" if along == "steps" else "training time (s)")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=along == "steps"))
