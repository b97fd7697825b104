"""Where the user's code raised: its file and line, and the traceback from its first frame on."""

from __future__ import annotations

import sysconfig
import traceback
from collections.abc import Iterator
from pathlib import Path
from traceback import FrameSummary, TracebackException

from rlframework.plugins.discovery import extra_of

_MOST_LINES = 80
"""Lines of a traceback: its last ones, which are those of the error itself and not of what caused it."""

_CORE = str(Path(__file__).parents[1])
_STANDARD, _PACKAGES = sysconfig.get_path("stdlib"), sysconfig.get_path("purelib")
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def traceback_of(error: BaseException) -> str:
    """Return the traceback of `error` and its causes, from the user's first frame on; empty if they have none."""
    shown = TracebackException.from_exception(error)
    for each in _with_causes(shown):
        each.stack[:] = _from_user(each.stack)
    if not any(each.stack for each in _with_causes(shown)):
        return ""
    lines = "".join(shown.format()).rstrip().splitlines()
    return "\n".join(["...", *lines[-_MOST_LINES:]] if len(lines) > _MOST_LINES else lines)


def place_of(error: BaseException) -> str:
    """Return `FILE:LINE` of the innermost frame of the user's own code in `error` or its causes; empty without one.

    Code of installed packages counts only where there is no other.
    """
    for each in _with_causes(TracebackException.from_exception(error, lookup_lines=False)):
        if frames := _from_user(each.stack):
            own = [frame for frame in frames if not _is_ours(frame) and not frame.filename.startswith(_LIBRARIES)]
            return _place(own[-1] if own else frames[0])
    return ""


def described(error: BaseException, where: str) -> str:
    """Return one sentence about `error`, raised in `where`: its type, its text, and the place in the user's code."""
    place = place_of(error)
    return f"{type(error).__name__} in {where}: {error}" + (f" ({place})" if place else "")


def _with_causes(error: TracebackException) -> Iterator[TracebackException]:
    """Yield `error` and what it was raised from, in the order in which they are to be looked at."""
    found: TracebackException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)


def _from_user(stack: traceback.StackSummary) -> list[FrameSummary]:
    """Return the frames from the first on that belongs neither to rlframework nor to the standard library."""
    for number, frame in enumerate(stack):
        name = frame.filename
        is_standard = name.startswith(_STANDARD) and not name.startswith(_PACKAGES)
        if not (is_standard or _is_ours(frame)):
            return stack[number:]
    return []


def _is_ours(frame: FrameSummary) -> bool:
    """Whether `frame` is of core, or of the package of a distribution that an extra of core installs."""
    folders = Path(frame.filename).parts[:-1]
    return frame.filename.startswith(_CORE) or any(
        name.startswith("rlframework_") and extra_of(name.removeprefix("rlframework_")) for name in folders
    )


def _place(frame: FrameSummary) -> str:
    path = Path(frame.filename)
    here = Path.cwd()
    return f"{path.relative_to(here) if path.is_relative_to(here) else path}:{frame.lineno}"
