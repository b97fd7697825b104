"""Warnings about failed groups: the first of each step in full, the others as one line with their number."""

from __future__ import annotations

import logging
import threading
from collections import Counter

_LOG = logging.getLogger(__name__)
_SHOWN = 3
"""Failures of a step that are logged one by one."""


class FailureLog:
    """Logs what fails in each step, in at most four lines, however many groups there are. Used by several threads."""

    def __init__(self) -> None:
        self._failed: Counter[int] = Counter()
        self._lock = threading.Lock()

    def add(self, step: int, message: str) -> None:
        """Log `message`, unless several of `step` have been logged already."""
        with self._lock:
            self._failed[step] += 1
            shown = self._failed[step] <= _SHOWN
        if shown:
            _LOG.warning("%s", message)

    def end(self, step: int) -> None:
        """Log how many failures of `step` were not shown, and forget them."""
        with self._lock:
            failed = self._failed.pop(step, 0)
        if failed > _SHOWN:
            _LOG.warning("step %d: %d groups failed; %d are not shown", step, failed, failed - _SHOWN)
