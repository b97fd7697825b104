"""The charts of the page as PNGs, one per group and one of phase times, for slides and other media than HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from rlframework.observers.curve import STYLE, write_png
from rlframework.observers.report.content import phases_of
from rlframework.observers.report.metrics import Chart, arrange, split_of
from rlframework.observers.report.reading import Run

COLOURS = ("#0067a8", "#cf5200", "#007a58", "#a8447e", "#6b4e00", "#5a35c9", "#6d7884", "#a3283a")
PHASES = ("#2f8ca3", "#e0a030", "#8062b5", "#6f9a3d", "#c5656f", "#51688c")
OTHER = "#b4bcc6"
MARKERS = ("o", "s", "^", "D")
ACROSS = 3


def draw_figures(runs: Sequence[Run], folder: Path, span: int) -> list[Path]:
    """Write the PNGs into `folder`, creating it; return their paths. `span` is the smoothing span in steps."""
    with rc_context(STYLE):
        return [write_png(figure, folder / f"{name}.png") for name, figure in _figures(runs, span)]


def _figures(runs: Sequence[Run], span: int) -> Iterator[tuple[str, Figure]]:
    for key, title, charts in arrange(name for run in runs for name in run.names):
        figure, axes = _sheet([chart.title for chart in charts], title)
        for chart, place in zip(charts, axes, strict=True):
            _draw_chart(place, chart, runs, span)
        if len(runs) > 1:
            keys = [Line2D([], [], color=_pick(COLOURS, i), marker=_pick(MARKERS, i)) for i in range(len(runs))]
            figure.legend(keys, [run.name for run in runs], loc="outside lower left", ncols=4, frameon=False)
        yield key, figure
    timed = [(run, phases) for run in runs if (phases := phases_of(run))]
    if timed:
        figure, axes = _sheet([f"{run.name}: seconds per step" for run, _ in timed], "Time of a step")
        names = dict.fromkeys(name for _, phases in timed for name in phases["names"] if name != "other")
        colours = {name: _pick(PHASES, index) for index, name in enumerate(names)} | {"other": OTHER}
        for (_, phases), place in zip(timed, axes, strict=True):
            middles = [(first + last) / 2 for first, last in zip(phases["from"], phases["to"], strict=True)]
            place.stackplot(middles, phases["values"], colors=[colours[name] for name in phases["names"]], step="mid")
        patches = [Patch(color=colour, label=name) for name, colour in colours.items()]
        figure.legend(handles=patches, loc="outside lower left", ncols=8, frameon=False)
        yield "phases", figure


def _pick(choices: Sequence[str], index: int) -> str:
    return choices[index % len(choices)]


def _sheet(titles: Sequence[str], heading: str) -> tuple[Figure, list[Axes]]:
    """A figure with a plot over steps for each of `titles`."""
    across = min(len(titles), ACROSS)
    down = -(-len(titles) // across)
    figure = Figure(figsize=(max(4.2 * across, 6.0), 2.6 * down + 0.7))
    figure.suptitle(heading, fontsize=12, fontweight="bold", x=0.01, ha="left")
    numbered = enumerate(titles, start=1)
    return figure, [figure.add_subplot(down, across, n, title=title, xlabel="step") for n, title in numbered]


def _draw_chart(axes: Axes, chart: Chart, runs: Sequence[Run], span: int) -> None:
    for index, run in enumerate(runs):
        colour = _pick(COLOURS, index)
        for name in chart.names:
            steps, values = run.series(name)
            if split_of(name) == "validation" or len(values) == 1:
                axes.plot(steps, values, color=colour, linewidth=1.0, linestyle=(0, (4, 2)), markersize=4,
                          marker=_pick(MARKERS, index), markerfacecolor="white",
                          markevery=max(1, len(values) // 20), zorder=4)  # fmt: skip
            else:
                shown = values if chart.planned else smoothed(steps, values, span)
                axes.plot(steps, values, color=colour, linewidth=0.7, alpha=0.3, zorder=2)
                axes.plot(steps, shown, color=colour, linewidth=1.6, zorder=3)
    if chart.percent:
        axes.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))


def smoothed(at: Sequence[float], values: Sequence[float], span: float) -> list[float]:
    """Bias-corrected exponential moving average over about `span` steps; 1 leaves `values` unchanged.

    A value `d` steps back has `((span - 1) / (span + 1)) ** d` times the weight of the newest.
    """
    decay = (span - 1) / (span + 1)
    total = weight = 0.0
    result = []
    for index, value in enumerate(values):
        keep = decay ** max(at[index] - at[index - 1], 0.0) if index else 0.0
        total, weight = total * keep + value, weight * keep + 1.0
        result.append(total / weight)
    return result
