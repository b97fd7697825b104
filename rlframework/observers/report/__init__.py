"""`rlframework report`: one HTML page, and pictures, of what runs leave in their folders.

    write_report([Path("runs/a"), Path("runs/b")], Path("report.html"))

Reads files only: no model, no plugin and no network, now or when the page is opened. It does not follow a run that is
going on; made again, the page shows what is there by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rlframework.errors import UserError
from rlframework.files import write_atomically

__all__ = ["default_page", "write_report"]

PAGE = "report.html"


def default_page(runs: Sequence[Path]) -> Path:
    """Where the page goes unless told: into the run, or, of several, into the working directory."""
    return runs[0] / PAGE if len(runs) == 1 else Path(PAGE)


def write_report(
    runs: Sequence[Path], page: Path | None = None, *, smooth: int | None = None, figures: Path | None = None
) -> tuple[Path, list[Path]]:
    """Write the page of `runs`, and PNGs into the folder `figures`; returns the page's path and the pictures'.

    `smooth` is the span, in steps, of the smoothing that the page opens with; by default a 25th of the longest run, at
    most 100. Raises `UserError` where a folder is no run, a file cannot be read, or there are no metrics yet; nothing
    is written then.
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
        raise UserError(f"--out {page}: the page's name must end in .html, so that no other file is overwritten")
    if page.is_dir():
        raise UserError(f"--out {page} is a folder; give a file in it, such as {page / PAGE}")
    if smooth is not None and smooth < 1:
        raise UserError(f"--smooth {smooth}: the span in steps must be 1 (no smoothing) or more")
