"""When the parts of a run were busy: recorded as spans of time, written to `timeline.jsonl` with one line per step.

The parts, called lanes, are the trainer, each engine, refits, and the environment with its rewards. Recording takes two
reads of a clock per span.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import itemgetter
from statistics import median
from typing import Any

from rlframework.plugins.hookspec import TimeSpan

TRAINER, REFITS, ENVIRONMENT = "trainer", "refits", "environment"
"""Lanes besides those of the engines."""
ENGINE = "engine "
"""The name of the lane of an engine, before its number."""
LITTLE = 0.1
"""Fraction of the time below which waiting is not worth a change."""

ENGINES = 16
"""Engines whose spans are written and drawn: the first ones."""

_RESOLUTION = 0.005
"""Gaps between equal activities that are shorter than this fraction of a step are not written."""
_SHORTEST = 0.0005
"""Seconds of the shortest span that is written."""
_BUSIEST = 3
"""Engines that are named among more than `ENGINES`."""


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
    where the earlier one ends. `busy` has the seconds of each lane without what was joined. Of more than `ENGINES`
    engines, only the first have lanes, and `engines` says how busy all of them were: their number, their seconds
    together, the least, the median and the most of one, and the busiest.
    """
    by_lane: dict[str, list[TimeSpan]] = {}
    for span in spans:
        by_lane.setdefault(span.lane, []).append(span)
    apart = {lane: list(_apart(own, start)) for lane, own in sorted(by_lane.items())}
    engines = sorted((lane for lane in apart if lane.startswith(ENGINE)), key=lambda lane: (len(lane), lane))
    busy = {lane: sum(ended - begun for _, begun, ended in own) for lane, own in apart.items()}
    hidden = set(engines[ENGINES:])
    lanes = {lane: _joined(own, _RESOLUTION * (end - start)) for lane, own in apart.items() if lane not in hidden}
    row = {
        "step": step,
        "start": round(start, 3),
        "seconds": round(end - start, 3),
        "lanes": {lane: own for lane, own in lanes.items() if own},
        "busy": {lane: round(busy[lane], 3) for lane, own in lanes.items() if own},
    }
    return row | ({"engines": _summary({lane: busy[lane] for lane in engines})} if hidden else {})


def _apart(spans: Sequence[TimeSpan], start: float) -> Iterator[tuple[str, float, float]]:
    """Activity, start and end of the spans of a lane, in seconds from `start`, without what overlaps."""
    until = -math.inf
    for _, activity, begun, ended in sorted(spans, key=itemgetter(2)):
        if ended > max(begun, until):
            yield activity, max(begun, until) - start, ended - start
            until = ended


def _joined(spans: Sequence[tuple[str, float, float]], gap: float) -> list[tuple[str, float, float]]:
    """Join the spans of equal activities between which there is at most `gap`, and leave out very short ones."""
    joined: list[tuple[str, float, float]] = []
    for activity, begun, ended in spans:
        if joined and joined[-1][0] == activity and begun - joined[-1][2] <= gap:
            begun = joined.pop()[1]
        joined.append((activity, begun, ended))
    return [
        (activity, round(begun, 3), round(ended, 3)) for activity, begun, ended in joined if ended - begun >= _SHORTEST
    ]


def _summary(busy: Mapping[str, float]) -> dict[str, Any]:
    """How many engines there are, their busy seconds together, and the least, median and most of one; the busiest."""
    seconds = sorted(busy.values())
    busiest = heapq.nlargest(_BUSIEST, busy, key=lambda lane: busy[lane])
    return {
        "count": len(seconds),
        "busy": round(sum(seconds), 3),
        "min": round(seconds[0], 3),
        "median": round(median(seconds), 3),
        "max": round(seconds[-1], 3),
        "busiest": {lane: round(busy[lane], 3) for lane in busiest},
    }
