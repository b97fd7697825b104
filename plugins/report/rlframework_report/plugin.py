"""The plugin of this distribution: the command `report`, and observers. Imports no service's package."""

from __future__ import annotations

from typing import Annotated

import typer
from typer import Argument, Option

from rlframework.cli.common import Debug
from rlframework.config.sections import ObserversConfig
from rlframework.plugins.hookspec import hookimpl


@hookimpl
def rlframework_commands(app: typer.Typer) -> None:
    """Add `report`."""
    app.command()(report)


@hookimpl
def rlframework_observers() -> dict[str, str]:
    """Return the import paths of the observers."""
    return {
        "tensorboard": "rlframework_report.services:TensorBoardObserver",
        "curve": "rlframework_report.curve:CurveObserver",
        "wandb": "rlframework_report.services:WandbObserver",
        "mlflow": "rlframework_report.services:MlflowObserver",
        "trackio": "rlframework_report.services:TrackioObserver",
    }


@hookimpl
def rlframework_observer_problems(config: ObserversConfig) -> list[str]:
    """Return a message for each service that cannot be used."""
    from rlframework_report.services import problems_of_services

    return problems_of_services(config)


def report(
    runs: Annotated[list[str], Argument(metavar="RUN_DIR...", help="Output directories of runs.")],
    out: Annotated[
        str | None,
        Option(metavar="FILE.html", help="File to write. Default: report.html, in RUN_DIR if there is one run."),
    ] = None,
    smooth: Annotated[int | None, Option(help="Smooth curves over this many steps; adjustable in the page.")] = None,
    png: Annotated[
        str | None, Option(metavar="DIR", help="Folder for the pictures. Default: next to the page.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write an HTML report on one or several runs: curves, timings, samples, configurations."""
    from pathlib import Path

    from rlframework_report.report import write_report

    page_path, figures = (None if path is None else Path(path) for path in (out, png))
    page, pictures = write_report([Path(run) for run in runs], page_path, smooth=smooth, figures=figures)
    where = f"; {len(pictures)} pictures in {pictures[0].parent}" if pictures else ""
    print(f"wrote {page} ({page.stat().st_size / 1e6:.1f} MB, open it in a browser){where}")
