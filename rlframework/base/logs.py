"""Where messages go: modules log to their own logger below `rlframework`, and `log_to_stderr` shows the messages."""

from __future__ import annotations

import logging
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from rlframework.base.errors import ConfigError
from rlframework.base.secrets import hide_in_text

_LOG = logging.getLogger(__name__)

SLOW_SECONDS = 5.0
"""How long a part of a plugin may take before `log_if_slow` names it."""

ProgressCallback = Callable[[int, int], None]
"""Called with the amount of work done and the total."""

LEVEL_VARIABLE = "RLFRAMEWORK_LOG_LEVEL"
"""Environment variable with the least level that is shown, one of `LEVELS`; worker processes get it too."""
LEVELS = ("debug", "info", "warning", "error")
_DEBUG_FORMAT = "%(asctime)s.%(msecs)03d %(process)d %(threadName)s: %(message)s"


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
    text = "still waiting for %s after %g s; the program goes on when it is done. To do without it: %s"
    timer = threading.Timer(SLOW_SECONDS, _LOG.log, (level, text, activity, SLOW_SECONDS, remedy))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def log_to_stderr() -> None:
    """Write the messages of rlframework to stderr as plain text, from the level of `LEVEL_VARIABLE` or INFO.

    At level DEBUG each message has the time, the process and the thread before it.

    Changes nothing in a program that has configured logging: if the logger `rlframework` or the root logger has a
    handler. The command line, `rlframework.run` and workers call this. Raises `ConfigError` for an unknown level.
    """
    logger = logging.getLogger("rlframework")
    if not logger.hasHandlers():
        level = _checked_level(os.environ.get(LEVEL_VARIABLE) or "info", LEVEL_VARIABLE)
        logger.addHandler(_StderrHandler())
        logger.propagate = False  # else a handler that a library adds to the root logger writes each message again
        _show_from(level)


def set_log_level(level: str) -> None:
    """Show messages from `level`, one of `LEVELS`, in this process and in those that it starts from now on.

    Raises `ConfigError` for another level.
    """
    os.environ[LEVEL_VARIABLE] = _checked_level(level, "--log-level")
    _show_from(os.environ[LEVEL_VARIABLE])


@contextmanager
def debug_span(logger: logging.Logger, doing: str, *arguments: object) -> Iterator[None]:
    """Context whose begin and end are logged at level DEBUG, as `doing` filled with `arguments`, and its seconds.

    Of an exception the class is logged, not its text, which may quote values.
    """
    if not logger.isEnabledFor(logging.DEBUG):
        yield
        return
    text, begun, outcome = doing % arguments, time.perf_counter(), "ends"
    logger.debug("%s: begins", text)
    try:
        yield
    except BaseException as error:
        outcome = f"raises {type(error).__name__}"
        raise
    finally:
        logger.debug("%s: %s after %.3f s", text, outcome, time.perf_counter() - begun)


def _checked_level(level: str, source: str) -> str:
    if level.lower() not in LEVELS:
        raise ConfigError(f"{source}={level!r} is not a level of messages: use {', '.join(LEVELS)}")
    return level.lower()


def _show_from(level: str) -> None:
    """Set the level of our handler's logger; that of a program that has configured logging stays."""
    logger = logging.getLogger("rlframework")
    for handler in logger.handlers:
        if isinstance(handler, _StderrHandler):
            logger.setLevel(level.upper())
            handler.setFormatter(logging.Formatter(_DEBUG_FORMAT, "%H:%M:%S") if level == "debug" else None)
