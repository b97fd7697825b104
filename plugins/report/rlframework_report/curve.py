"""Plots a run's training curves as a PNG: accuracy, reward, loss and KL, with a column for each phase.

Matplotlib is imported when something is drawn.
"""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rlframework.base.files import write_atomically
from rlframework.observers.jsonl import METRICS_FILE, History, add_row, read_history, series
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

SPLITS = {"train": ("training", "#1f6fb4"), "validation": ("held out", "#d1621b")}
QUANTITIES = {
    "accuracy": "accuracy", "reward": "reward", "loss": "loss", "kl": "KL to the reference (nats/token)",
}  # fmt: skip
"""Metrics without their split, and titles, of the rows of plots."""


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
    """Write a PNG of `histories` (pairs of label and rows of metrics, one per phase) to `path`; return `path`.

    Rows map metric names to values, with `step` if it is known. With `along="seconds"`, the horizontal axis is the
    cumulative sum of `time/step`. Missing metrics and non-finite values are skipped.
    """
    from matplotlib import rc_context

    with rc_context(STYLE):
        return write_png(curve_figure(histories, title, along), Path(path))


def curve_figure(histories: Sequence[tuple[str, History]], title: str, along: str) -> Figure:
    """The figure of `draw_curve`: a column per history, and a row per quantity that a history has."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    known = {name.partition("/")[2] for _, history in histories for row in history for name in row}
    quantities = [name for name in QUANTITIES if name in known] or ["loss"]
    figure = Figure(figsize=(max(8.0, 5.0 * len(histories)), 2.4 * len(quantities) + 0.6))
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
    grid = figure.subplots(len(quantities), max(len(histories), 1), squeeze=False)
    for column, (label, history) in enumerate(histories):
        steps = [float(row.get("step", index)) for index, row in enumerate(history, start=1)]
        at = seconds_of(history) if along == "seconds" else steps
        for axes, quantity in zip(grid[:, column], quantities, strict=True):
            for split, (word, colour) in SPLITS.items():
                places, values = series(history, f"{split}/{quantity}", at)
                if values:
                    text = f"{word}, last {values[-1]:.3g}"
                    draw_series(axes, places, values, max(at) / 25, split == "validation", color=colour, label=text)
            text = f"{label}: {QUANTITIES[quantity]}" if len(histories) > 1 else QUANTITIES[quantity]
            axes.set(title=text, xlabel="step" if along == "steps" else "training time (s)", visible=bool(axes.lines))
            if axes.lines:
                axes.legend()
            if quantity == "accuracy":
                axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
    return figure


def draw_series(
    axes: Axes, at: Sequence[float], values: Sequence[float], span: float, held_out: bool, **style: Any
) -> None:
    """Draw `values`: dashed with marks if `held_out`, else faintly and again smoothed over `span` (see `smoothed`)."""
    if held_out or len(values) == 1:
        style = {"marker": "o"} | style
        axes.plot(at, values, linewidth=1.0, linestyle=(0, (4, 2)), markersize=4, markerfacecolor="white",
                  markevery=max(1, len(values) // 20), zorder=4, **style)  # fmt: skip
    else:
        axes.plot(at, values, linewidth=0.7, alpha=0.3, zorder=2, color=style["color"])
        axes.plot(at, smoothed(at, values, span), linewidth=1.6, zorder=3, **{**style, "marker": ""})


def smoothed(at: Sequence[float], values: Sequence[float], span: float) -> list[float]:
    """Bias-corrected exponential moving average over about `span` on the axis; at most 1 leaves `values` unchanged.

    A value `d` back has `((span - 1) / (span + 1)) ** d` times the weight of the newest.
    """
    decay = max(span - 1, 0) / (span + 1)
    total = weight = 0.0
    result = []
    for index, value in enumerate(values):
        keep = decay ** max(at[index] - at[index - 1], 0.0) if index else 0.0
        total, weight = total * keep + value, weight * keep + 1.0
        result.append(total / weight)
    return result


def write_png(figure: Figure, path: Path) -> Path:
    """Write `figure` to `path`, replacing the file at once; return `path`."""
    picture = io.BytesIO()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # names have letters that the font lacks, even control characters
        figure.savefig(picture, format="png", dpi=130)
    write_atomically(path, picture.getvalue())
    return path


def seconds_of(history: History) -> list[float]:
    """Seconds of training up to the end of each row: the cumulative sum of `time/step`."""
    spent = (row.get("time/step", 0.0) for row in history)
    return list(accumulate(seconds if math.isfinite(seconds) else 0.0 for seconds in spent))
