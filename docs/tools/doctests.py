"""A griffe extension: examples in docstrings, which begin with `>>>`, become code, and not quotations of quotations."""

from __future__ import annotations

from typing import Any

import griffe


class Doctests(griffe.Extension):
    """Fences the examples of every docstring that is shown."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called by griffe for each object, once it is read."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            obj.docstring.value = fenced(obj.docstring.value)


def fenced(text: str) -> str:
    """`text` with a fence around each example: from a line that begins with `>>>` to the next empty line."""
    lines: list[str] = []
    inside = False
    for line in text.splitlines():
        starts = line.lstrip().startswith(">>> ")
        if starts and not inside:
            lines.append("```pycon")
            inside = True
        elif inside and not line.strip():
            lines.append("```")
            inside = False
        lines.append(line)
    return "\n".join([*lines, "```"] if inside else lines)
