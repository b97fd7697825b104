"""Build SVG pictures from boxes, arrows and text, with light and dark color schemes.

A picture has its own background, so that it stays readable if the page's colors and the reader's settings differ.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_STYLE = """
  text { font: 13px ui-sans-serif, system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1d2b2a; }
  .title { font-size: 14px; font-weight: 600; }
  .small { font-size: 11.5px; fill: #4b5c5a; }
  .code { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 12px; }
  .paper { fill: #fbfdfc; stroke: #d3dddb; }
  .box { fill: #ffffff; stroke: #7f9491; }
  .driver { fill: #e3f2ef; stroke: #3d8578; }
  .worker { fill: #fdf0dd; stroke: #b07a24; }
  .frame { fill: none; stroke: #b07a24; stroke-dasharray: 5 4; }
  .line { stroke: #4b5c5a; fill: none; stroke-width: 1.4; }
  .head { fill: #4b5c5a; }
  .zero { fill: #8fcfc2; stroke: #2f6f64; }
  .one { fill: #f3c27c; stroke: #8a5c14; }
  .both { fill: #dfe5e4; stroke: #7f9491; }
  .pad { fill: none; stroke: #a9b7b5; stroke-dasharray: 3 3; }
  .on { fill: #10201e; }
  @media (prefers-color-scheme: dark) {
    text { fill: #e4ecea; }
    .small { fill: #aebdba; }
    .paper { fill: #1b2322; stroke: #3a4846; }
    .box { fill: #222d2b; stroke: #6f8481; }
    .driver { fill: #1f3a35; stroke: #5fb3a3; }
    .worker { fill: #3b2e18; stroke: #d9a04a; }
    .frame { stroke: #d9a04a; }
    .line { stroke: #aebdba; }
    .head { fill: #aebdba; }
    .zero { fill: #2f7d6f; stroke: #8fcfc2; }
    .one { fill: #9a6a1f; stroke: #f3c27c; }
    .both { fill: #36423f; stroke: #6f8481; }
    .pad { stroke: #5d6d6a; }
    .on { fill: #ffffff; }
  }
"""


def picture(width: int, height: int, title: str, parts: Sequence[str]) -> str:
    """Return a complete SVG file; `title` is for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'role="img" aria-label="{escape(title)}">\n<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n'
        f'<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path class="head" d="M0 0 L8 4 L0 8 z"/></marker></defs>\n'
        + rectangle(0.5, 0.5, width - 1, height - 1, "paper", 8)
        + "\n"
        + "\n".join(parts)
        + "\n</svg>\n"
    )


def rectangle(x: float, y: float, width: float, height: float, kind: str, radius: float = 4) -> str:
    """Return a rectangle with the CSS class `kind`."""
    return f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"/>'


def words(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    """Return a line of text; `y` is its baseline."""
    return f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(text)}</text>'


def arrow(*points: tuple[float, float]) -> str:
    """Return an arrow through `points`."""
    path = " ".join(f"{x:g},{y:g}" for x, y in points)
    return f'<polyline class="line" points="{path}" marker-end="url(#tip)"/>'


def box(x: float, y: float, width: float, kind: str, title: str, *lines: str) -> tuple[str, float]:
    """Return a box with a title and lines of text, and the y coordinate of its bottom."""
    height = 26 + 17 * len(lines) + (4 if lines else 0)
    parts = [rectangle(x, y, width, height, kind), words(x + 12, y + 18, title, "title")]
    parts += [words(x + 12, y + 36 + 17 * number, line, "small") for number, line in enumerate(lines)]
    return "\n".join(parts), y + height
