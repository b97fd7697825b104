"""`rlframework report`: one self-contained HTML page, and figures, from the output directories of runs.

    write_report([Path("runs/a"), Path("runs/b")], Path("report.html"))

Only reads files: neither writing nor opening the page needs a model, a plugin or the network. The page does not follow
a run in progress; create it again to update it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlframework.errors import UserError
from rlframework.files import write_atomically

__all__ = ["default_page", "write_report"]

PAGE = "report.html"


def default_page(runs: Sequence[Path]) -> Path:
    """The default path of the page: in the run's directory, or in the working directory for several runs."""
    return runs[0] / PAGE if len(runs) == 1 else Path(PAGE)


def write_report(
    runs: Sequence[Path], page: Path | None = None, *, smooth: int | None = None, figures: Path | None = None
) -> tuple[Path, list[Path]]:
    """Write the page of `runs`, and PNGs into the folder `figures`; return the path of the page and of the PNGs.

    `smooth` is the initial smoothing span of the page in steps, by default a 25th of the longest run, at most 100.
    Raises `UserError`, without writing anything, if a folder is not a run, a file cannot be read, or a run has no
    metrics yet.
    """
    page = page or default_page(runs)
    _check(page, smooth)
    from rlframework.observers.report.content import content
    from rlframework.observers.report.figures import draw_figures
    from rlframework.observers.report.page import render
    from rlframework.observers.report.reading import read_runs

    read = read_runs(runs)
    span = smooth or max(1, min(100, round(max(run.last_step for run in read) / 25)))
    write_atomically(page, render(content(read, span)))
    return page, draw_figures(read, figures or page.with_name(f"{page.stem}-figures"), span)


def _check(page: Path, smooth: int | None) -> None:
    if page.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {page}: the file name must end in .html, so that no other file is overwritten")
    if page.is_dir():
        raise UserError(f"--out {page} is a folder: give the path of a file, such as {page / PAGE}")
    if smooth is not None and smooth < 1:
        raise UserError(f"--smooth {smooth}: the span must be at least 1 step (1 means no smoothing)")
