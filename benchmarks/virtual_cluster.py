"""A cluster in virtual time: engines that generate groups of rows, a trainer, and a rule that says what it trains.

An engine has a fixed number of places for rows, each of which generates at a constant speed; rows wait in order of
arrival, as in `GenerationClient`. New weights stop all engines for a moment, after which rows in progress continue.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from asynchrony_rules import ROWS, Group, Rule

_TRACE = 10_000
"""Groups of a trace, which is repeated after them."""


@cache
def trace(seed: int, sigma: float, longest: float) -> np.ndarray[Any, Any]:
    """Return the lengths of the rows of groups, `[N, ROWS]`: log-normal with mean 1, then cut at `longest`."""
    normal = np.random.default_rng(seed).standard_normal((_TRACE, ROWS))
    return np.minimum(np.exp(sigma * normal - 0.5 * sigma**2), longest)


@dataclass(frozen=True)
class Cluster:
    """The settings of a run, whose unit of time is the mean length of a row.

    `places`: of an engine. `rows_per_place`: rows of a training step for each place. `trainer`: time of a training step
    over the time in which the engines generate one when none of them waits. `refit`: that of new weights, likewise.
    """

    engines: int
    places: int = 8
    rows_per_place: float = 4.0
    sigma: float = 1.0
    longest: float = 4.0
    trainer: float = 1.0
    refit: float = 0.01
    steps: int = 40
    warmup: int = 10

    @property
    def groups(self) -> int:
        """Groups of a training step."""
        return max(1, round(self.engines * self.places * self.rows_per_place / ROWS))


class Run:
    """A run of `cluster` by `rule`, with the trace of a seed.

    `now`: the time. `waited`: that of the trainer, after the warm-up. `staleness`: of the first token of each trained
    group. `dropped`: groups that were, `dropped_complete` of which were complete.
    """

    def __init__(self, cluster: Cluster, rule: Rule, seed: int) -> None:
        self.cluster, self.rule = cluster, rule
        self.now = self.waited = self._measured_from = self._paused = 0.0
        self.staleness: list[int] = []
        self.dropped = self.dropped_complete = 0
        self._lengths = trace(seed, cluster.sigma, cluster.longest)
        self._free = cluster.engines * cluster.places
        self._turn = cluster.groups * ROWS * float(self._lengths.mean()) / self._free
        self._heap: list[tuple[float, int, Group]] = []
        self._queue: deque[tuple[Group, float]] = deque()
        self._number = 0

    @property
    def step_time(self) -> float:
        """Mean time of a step after the warm-up, over that in which engines generate one if they never wait."""
        return (self.now - self._measured_from) / (self.cluster.steps - self.cluster.warmup) / self._turn

    @property
    def trainer_idle(self) -> float:
        """Fraction of the time after the warm-up in which the trainer waited for groups."""
        return self.waited / (self.now - self._measured_from)

    def play(self) -> Run:
        """Train all steps."""
        cluster = self.cluster
        training, refit = cluster.trainer * self._turn, cluster.refit * self._turn
        self._start()
        for step in range(1, cluster.steps + 1):
            if step == cluster.warmup + 1:
                self._measured_from, self.waited = self.now, 0.0
            begun = self.now
            while (batch := self.rule.take(step)) is None:
                self._end_a_row()
            self.waited += self.now - begun
            self.staleness += [step - 1 - group.started for group in batch]
            trained = self.now + training
            while self._next_end() <= trained:
                self._end_a_row()
            self.now, self._paused = trained + refit, self._paused + refit
            self._drop(self.rule.publish(step))
            self._start()
        return self

    def _next_end(self) -> float:
        while self._heap and self._heap[0][2].dropped:
            heapq.heappop(self._heap)
        return self._heap[0][0] + self._paused if self._heap else math.inf

    def _end_a_row(self) -> None:
        """Go on to the end of the next row."""
        self.now = max(self.now, self._next_end())
        assert self._heap, "the step waits, but nothing is in progress"
        _, _, group = heapq.heappop(self._heap)
        self._free += 1
        group.rows -= 1
        if not group.rows:
            self.rule.complete(group)
        self._start()

    def _start(self) -> None:
        """Give each free place a row, while the rule has more."""
        while self._free:
            if not self._queue:
                if (group := self.rule.begin()) is None:
                    return
                self._queue.extend((group, length) for length in self._lengths[group.number % _TRACE].tolist())
            group, length = self._queue.popleft()
            if not group.dropped:
                self._free -= 1
                self._number += 1
                heapq.heappush(self._heap, (self.now - self._paused + length, self._number, group))

    def _drop(self, groups: Sequence[Group]) -> None:
        for group in groups:
            group.dropped = True
            self.dropped_complete += not group.rows
        self.dropped += len(groups)
        if groups:
            left = [each for each in self._heap if not each[2].dropped]
            self._free += len(self._heap) - len(left)
            heapq.heapify(left)
            self._heap = left
