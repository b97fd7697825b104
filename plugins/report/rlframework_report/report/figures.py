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

from rlframework.base.logs import printable
from rlframework.observers.runs import Run
from rlframework_report.curve import STYLE, draw_series, write_png
from rlframework_report.report.charts import arrange, bounds_of, split_of, worth_drawing
from rlframework_report.report.content import phases_of

COLOURS = ("#0067a8", "#cf5200", "#007a58", "#a8447e", "#6b4e00", "#5a35c9", "#6d7884", "#a3283a")
PHASES = ("#2f8ca3", "#e0a030", "#8062b5", "#6f9a3d", "#c5656f", "#51688c", "#3f9b7a", "#96693d")
OTHER = "#b4bcc6"
MARKERS = ("o", "s", "^", "D")
ACROSS = 3


def draw_figures(runs: Sequence[Run], folder: Path, span: int) -> list[Path]:
    """Write the PNGs into `folder`, creating it; return their paths. `span` is the smoothing span in steps."""
    with rc_context(STYLE):
        return [write_png(figure, folder / f"{name}.png") for name, figure in _figures(runs, span)]


def _figures(runs: Sequence[Run], span: int) -> Iterator[tuple[str, Figure]]:
    looks = [(_pick(COLOURS, index), _pick(MARKERS, index)) for index in range(len(runs))]
    for key, title, all_charts in arrange(name for run in runs for name in run.names):
        if not (charts := worth_drawing(all_charts, runs)[0]):
            continue
        figure, axes = _sheet([chart.title for chart in charts], title)
        for chart, place in zip(charts, axes, strict=True):
            for run, (colour, marker) in zip(runs, looks, strict=True):
                for name in chart.names:
                    smoothing, held_out = 1 if chart.planned else span, split_of(name) == "validation"
                    draw_series(place, *run.series(name), smoothing, held_out, color=colour, marker=marker)
                    if name in chart.intervals and run.series(bounds_of(name)[0])[0]:
                        (at, low), (_, high) = map(run.series, bounds_of(name))
                        place.fill_between(at, low, high, color=colour, alpha=0.15)
            if chart.percent:
                place.yaxis.set_major_formatter(PercentFormatter(xmax=1.0))
        if len(runs) > 1:
            keys = [Line2D([], [], color=colour, marker=marker) for colour, marker in looks]
            figure.legend(keys, [printable(run.name) for run in runs], loc="outside lower left", ncols=4, frameon=False)
        yield key, figure
    timed = [(run, phases) for run in runs if (phases := phases_of(run))]
    if timed:
        figure, axes = _sheet([f"{run.name}: seconds per step" for run, _ in timed], "Time of a step")
        names = dict.fromkeys(name for _, phases in timed for name in phases["names"] if name != "other")
        colours = {name: _pick(PHASES, index) for index, name in enumerate(names)} | {"other": OTHER}
        for (_, phases), place in zip(timed, axes, strict=True):
            middles = [(first + last) / 2 for first, last in zip(phases["from"], phases["to"], strict=True)]
            place.stackplot(middles, phases["values"], colors=[colours[name] for name in phases["names"]], step="mid")
        patches = [Patch(color=colour, label=printable(name)) for name, colour in colours.items()]
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
    return figure, [figure.add_subplot(down, across, n, title=printable(title), xlabel="step") for n, title in numbered]
