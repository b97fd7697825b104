"""When the parts of a run were busy: recorded as spans of time, written to `timeline.jsonl` with one line per step.

The parts, called lanes, are the trainer, each engine, refits, and the environment with its rewards. Recording takes two
reads of a clock per span.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rlframework.plugins.hookspec import TimeSpan

TRAINER, REFITS, ENVIRONMENT = "trainer", "refits", "environment"
"""Lanes besides those of the engines."""

_RESOLUTION = 0.005
"""Gaps between equal activities that are shorter than this fraction of a step are not written."""
_SHORTEST = 0.0005
"""Seconds of the shortest span that is written."""


class Timeline:
    """Collects spans of time. `add` may be called from several threads."""

    def __init__(self) -> None:
        self._spans: list[TimeSpan] = []
        self._lock = threading.Lock()
        self._zero = time.time() - time.perf_counter()

    def add(self, lane: str, activity: str, start: float, end: float) -> None:
        """Add a span from `start` to `end`, times of `time.perf_counter`."""
        with self._lock:
            self._spans.append(TimeSpan(lane, activity, start + self._zero, end + self._zero))

    def pop(self) -> list[TimeSpan]:
        """Return the spans that ended since the last call."""
        with self._lock:
            spans, self._spans = self._spans, []
        return spans


@contextmanager
def timed(timeline: Timeline | None, lane: str, activity: str) -> Iterator[None]:
    """Context that adds its duration to `timeline`, if there is one."""
    begun = time.perf_counter()
    try:
        yield
    finally:
        if timeline is not None:
            timeline.add(lane, activity, begun, time.perf_counter())


def timeline_row(step: int, spans: Sequence[TimeSpan], start: float, end: float) -> dict[str, Any]:
    """Return the line of a step that took from `start` to `end`, in seconds since 1970.

    `lanes` has activity, start and end of the spans of each lane, in seconds from `start`, before which an engine may
    have begun; spans between which there is next to no time are joined, and of spans that overlap, the later one begins
    where the earlier one ends. `busy` has the seconds of each lane without what was joined.
    """
    lanes: dict[str, list[tuple[str, float, float]]] = {}
    busy: dict[str, float] = {}
    for span in sorted(spans, key=lambda span: span.start):
        own = lanes.setdefault(span.lane, [])
        begun, ended = span.start - start, span.end - start
        begun = max(begun, own[-1][2]) if own else begun
        if ended <= begun:
            continue
        busy[span.lane] = busy.get(span.lane, 0.0) + ended - begun
        if own and own[-1][0] == span.activity and begun - own[-1][2] <= _RESOLUTION * (end - start):
            begun = own.pop()[1]
        own.append((span.activity, begun, ended))
    lanes = {lane: [each for each in own if each[2] - each[1] >= _SHORTEST] for lane, own in lanes.items()}
    return {
        "step": step,
        "start": round(start, 3),
        "seconds": round(end - start, 3),
        "lanes": {
            lane: [(activity, round(begun, 3), round(ended, 3)) for activity, begun, ended in own]
            for lane, own in sorted(lanes.items())
            if own
        },
        "busy": {lane: round(seconds, 3) for lane, seconds in sorted(busy.items()) if lanes[lane]},
    }
