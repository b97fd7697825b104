"""Where messages go: modules log to their own logger below `rlframework`, and `log_to_stderr` shows the messages."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import TextIO

ProgressCallback = Callable[[int, int], None]
"""Called with the amount of work done and the total."""


class _StderrHandler(logging.StreamHandler[TextIO]):
    """Writes to the current `sys.stderr`, which a program may replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr


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
