"""Tracebacks of rlframework's errors in notebooks: the lines of the user's own code, and the message.

IPython shows each frame of a traceback with five lines around it, so that a mistake in one cell would fill the screen
with our code. It calls `_render_traceback_` of an exception that has this method and shows the lines it returns.
`traceback.print_last()` still shows everything.
"""

from __future__ import annotations

import re
import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path

_CORE = str(Path(__file__).parents[1])
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_FRAME = re.compile(r'  File "(?P<name>[^"]+)", line \d+')
_ALL = "(only frames of your own code are shown; all: import traceback; traceback.print_last())"


class ShortInNotebooks(BaseException):
    """Base class of exceptions that IPython shows without the frames of rlframework and of libraries."""

    def _render_traceback_(self) -> list[str]:
        frames = [frame for frame in traceback.extract_tb(self.__traceback__) if is_users_code(frame.filename)]
        lines = "".join(traceback.format_list(frames)).splitlines()
        for error in _with_causes(self):
            word = "" if error is self else "caused by "
            lines += [f"{word}{type(error).__name__}: {without_library_frames(str(error)).rstrip()}"]
        return [*lines, *getattr(self, "__notes__", ()), _ALL]


def is_users_code(filename: str) -> bool:
    """Whether the file is neither of rlframework or a plugin nor of the standard library or an installed package."""
    ours = filename.startswith(_CORE) or any(part.startswith("rlframework_") for part in Path(filename).parts[:-1])
    return not ours and not filename.startswith(_LIBRARIES)


def without_library_frames(message: str) -> str:
    """Return `message` without the frames that are not the user's, of the worker's traceback that it may contain."""
    lines, keeps = list[str](), True
    for line in message.split("\n"):
        if frame := _FRAME.match(line):
            keeps = is_users_code(frame["name"])
        elif not line.startswith("    "):  # the source of a frame is indented by four
            keeps = True
        lines += [line] * keeps
    return "\n".join(lines)


def _with_causes(error: BaseException) -> Iterator[BaseException]:
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__
