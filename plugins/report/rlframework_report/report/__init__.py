"""`rlframework report`: one self-contained HTML page, and figures, from the output directories of runs.

    write_report([Path("runs/a"), Path("runs/b")], Path("report.html"))

Completions and configurations are untrusted. The page contains them only as JSON in which `<`, `>` and `&` are escaped,
and the scripts display them as text, never as HTML. As a second line of defence, the page's Content-Security-Policy
blocks all other scripts and all requests.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from rlframework.base.errors import UserError
from rlframework.base.files import write_atomically
from rlframework_report.report.content import content
from rlframework_report.report.figures import draw_figures
from rlframework_report.report.runs import read_runs

__all__ = ["render", "write_report"]

PAGE = "report.html"
SCRIPTS = (
    "base.js",
    "chart.js",
    "curves.js",
    "phases.js",
    "timeline.js",
    "device.js",
    "samples.js",
    "tables.js",
    "main.js",
)


def write_report(
    runs: Sequence[Path], page: Path | None = None, *, smooth: int | None = None, figures: Path | None = None
) -> tuple[Path, list[Path]]:
    """Write the page of `runs`, and PNGs into the folder `figures`; return the path of the page and of the PNGs.

    By default, the page is `report.html` in the run's directory, or in the working directory for several runs.
    `smooth` is the initial smoothing span of the page in steps, by default a 25th of the longest run, at most 100.
    Raises `UserError`, without writing anything, if a folder is not a run, a file cannot be read, or a run has no
    metrics yet.
    """
    page = page or (runs[0] / PAGE if len(runs) == 1 else Path(PAGE))
    if page.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out {page}: the file name must end in .html, so that no other file is overwritten")
    if page.is_dir():
        raise UserError(f"--out {page} is a folder: give the path of a file, such as {page / PAGE}")
    if smooth is not None and smooth < 1:
        raise UserError(f"--smooth {smooth}: the span must be at least 1 step (1 means no smoothing)")
    read = read_runs(runs)
    span = smooth or max(1, min(100, round(max(run.last_step for run in read) / 25)))
    write_atomically(page, render(content(read, span)))
    return page, draw_figures(read, figures or page.with_name(f"{page.stem}-figures"), span)


def render(data: Mapping[str, Any]) -> str:
    """Render `data` (see `content`) as HTML."""
    style = _asset("page.css")
    script = '"use strict";\n(() => {\n' + "\n".join(map(_asset, SCRIPTS)) + "\n})();\n"
    # not Jinja's `tojson`: this leaves letters of other alphabets as they are, which take twice the space as escapes
    text = json.dumps(data, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    text = re.sub(r"[<>&\u2028\u2029\ud800-\udfff]", lambda found: f"\\u{ord(found[0]):04x}", text)
    return (
        Environment(autoescape=True, undefined=StrictUndefined)
        .from_string(_asset("page.html"))
        .render(
            title=data["title"].encode("utf-8", "replace").decode(),
            data=text,
            style=style,
            script=script,
            style_hash=_hash(style),
            script_hash=_hash(script),
        )
    )


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    return (Path(__file__).parent / "assets" / name).read_text(encoding="utf-8")
