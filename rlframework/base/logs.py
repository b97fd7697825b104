"""Where messages go: modules log to their own logger below `rlframework`, and `log_to_stderr` shows the messages."""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rlframework.base.secrets import hide_in_text

_LOG = logging.getLogger(__name__)

SLOW_SECONDS = 5.0
"""How long a part of a plugin may take before `log_if_slow` names it."""

ProgressCallback = Callable[[int, int], None]
"""Called with the amount of work done and the total."""


_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b\u2028-\u202e\u2060-\u2069\ufeff\ufff9-\ufffb\ud800-\udfff]"
)


def printable(text: str) -> str:
    """`text` with `\\u001b` in place of control, bidirectional and invisible characters, and of lone surrogates.

    Line breaks and tabs are kept. JSON stays the same value.
    """
    return _UNPRINTABLE.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a program may replace, without secrets and control characters."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    def format(self, record: logging.LogRecord) -> str:
        return printable(hide_in_text(super().format(record)))

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


def plugin_logger(module: str) -> logging.Logger:
    """Return the logger for a module of a plugin, given as `__name__`: below `rlframework`, so that it is shown.

    >>> plugin_logger("rlframework_ray.runtime").name
    'rlframework.ray.runtime'
    """
    return logging.getLogger(f"rlframework.{module.removeprefix('rlframework_')}")


@contextmanager
def log_if_slow(activity: str, level: int, remedy: str) -> Iterator[None]:
    """Log that the program is waiting for `activity` if it takes longer than `SLOW_SECONDS`; `remedy`: how to avoid it.

    Nothing is interrupted: the message says which plugin a program hangs in.
    """
    text = "waiting for %s, for %g s so far; to do without it: %s"
    timer = threading.Timer(SLOW_SECONDS, _LOG.log, (level, text, activity, SLOW_SECONDS, remedy))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def log_to_stderr() -> None:
    """Write the messages of rlframework to stderr as plain text, from level INFO, in this process.

    Changes nothing in a program that has configured logging: if the logger `rlframework` or the root logger has a
    handler. The command line, `rlframework.run` and workers call this.
    """
    logger = logging.getLogger("rlframework")
    if not logger.hasHandlers():
        logger.addHandler(_StderrHandler())
        logger.setLevel(logging.INFO)
        logger.propagate = False  # else a handler that a library adds to the root logger writes each message again
