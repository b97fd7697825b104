"""The charts of the page as PNGs, one per group and one of phase times, for slides and other media than HTML."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlframework.files import write_atomically
from rlframework.observers.report.content import phases_of
from rlframework.observers.report.metrics import Chart, arrange, split_of
from rlframework.observers.report.reading import Run
from rlframework.observers.report.thinning import smoothed
from rlframework.observers.series import series

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = ("#0067a8", "#cf5200", "#007a58", "#a8447e", "#6b4e00", "#5a35c9", "#6d7884", "#a3283a")
PHASES = ("#2f8ca3", "#e0a030", "#8062b5", "#6f9a3d", "#c5656f", "#51688c")
MARKERS = ("o", "s", "^", "D")
OTHER, GRID, INK, SOFT = "#b4bcc6", "#e9ecf0", "#1a2129", "#566170"
STYLE: dict[Any, Any] = {
    "font.size": 9, "axes.titlesize": 10, "axes.edgecolor": GRID, "text.color": INK, "axes.labelcolor": SOFT,
    "xtick.color": SOFT, "ytick.color": SOFT, "axes.titlecolor": INK,
}  # fmt: skip
ACROSS = 3


def draw_figures(runs: Sequence[Run], folder: Path, span: int) -> list[Path]:
    """Write the PNGs into `folder`, creating it; return their paths. `span` is the smoothing span in steps."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    paths = []
    with rc_context(STYLE):
        for name, figure in _figures(runs, span):
            FigureCanvasAgg(figure)
            picture = io.BytesIO()
            figure.savefig(picture, format="png", dpi=130)
            write_atomically(folder / f"{name}.png", picture.getvalue())
            paths.append(folder / f"{name}.png")
    return paths


def _figures(runs: Sequence[Run], span: int) -> Iterator[tuple[str, Figure]]:
    names = dict.fromkeys(name for run in runs for row in run.history for name in row)
    for key, title, charts in arrange(names):
        figure, axes = _sheet(len(charts), title)
        for chart, place in zip(charts, axes, strict=True):
            _draw_chart(place, chart, runs, span)
        _legend(figure, runs)
        yield key, figure
    timed = [run for run in runs if phases_of(run)]
    if timed:
        figure, axes = _sheet(len(timed), "Time of a step")
        phases = list(dict.fromkeys(name for run in timed for name in _phase_names(run)))
        for run, place in zip(timed, axes, strict=True):
            _draw_phases(place, run, phases)
        _legend_of_phases(figure, phases)
        yield "phases", figure


def _sheet(count: int, title: str) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    across = min(count, ACROSS)
    down = -(-count // across)
    figure = Figure(figsize=(max(4.2 * across, 6.0), 2.6 * down + 0.7), layout="constrained")
    figure.suptitle(title, fontsize=12, fontweight="bold", x=0.01, ha="left")
    return figure, [figure.add_subplot(down, across, index + 1) for index in range(count)]


def _draw_chart(axes: Axes, chart: Chart, runs: Sequence[Run], span: int) -> None:
    _style_axes(axes, chart.title)
    for index, run in enumerate(runs):
        at = [float(row["step"]) for row in run.history]
        for name in chart.names:
            places, values = series(run.history, name, at)
            colour = COLOURS[index % len(COLOURS)]
            if split_of(name) == "validation" or len(values) == 1:
                axes.plot(places, values, color=colour, linewidth=1.0, linestyle=(0, (4, 2)), markersize=4,
                          marker=MARKERS[index % len(MARKERS)], markerfacecolor="white",
                          markevery=max(1, len(values) // 20), zorder=4)  # fmt: skip
            else:
                shown = values if chart.planned else smoothed(places, values, span)
                axes.plot(places, values, color=colour, linewidth=0.7, alpha=0.3, zorder=2)
                axes.plot(places, shown, color=colour, linewidth=1.6, zorder=3)
    if chart.percent:
        from matplotlib.ticker import PercentFormatter

        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))


def _phase_names(run: Run) -> list[str]:
    phases = phases_of(run)
    return [] if phases is None else [name for name in phases["names"] if name != "other"]


def _colour_of_phase(name: str, names: Sequence[str]) -> str:
    return OTHER if name == "other" else PHASES[names.index(name) % len(PHASES)]


def _legend_of_phases(figure: Figure, names: Sequence[str]) -> None:
    from matplotlib.patches import Patch

    keys = [Patch(color=_colour_of_phase(name, names), label=name) for name in (*names, "other")]
    figure.legend(handles=keys, loc="outside lower left", ncols=8, frameon=False, fontsize=9)


def _draw_phases(axes: Axes, run: Run, names: Sequence[str]) -> None:
    phases = phases_of(run)
    assert phases is not None
    _style_axes(axes, f"{run.name}: seconds per step")
    colours = [_colour_of_phase(name, names) for name in phases["names"]]
    middles = [(first + last) / 2 for first, last in zip(phases["from"], phases["to"], strict=True)]
    axes.stackplot(middles, phases["values"], colors=colours, step="mid")


def _legend(figure: Figure, runs: Sequence[Run]) -> None:
    from matplotlib.lines import Line2D

    if len(runs) > 1:
        keys = [Line2D([], [], color=COLOURS[i % len(COLOURS)], marker=MARKERS[i % len(MARKERS)], linewidth=1.6,
                       markersize=4) for i in range(len(runs))]  # fmt: skip
        names = [run.name.replace("$", r"\$") for run in runs]
        figure.legend(keys, names, loc="outside lower left", ncols=4, frameon=False, fontsize=9)


def _style_axes(axes: Axes, title: str) -> None:
    axes.set_title(title.replace("$", r"\$"), loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color=GRID, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel("step")
