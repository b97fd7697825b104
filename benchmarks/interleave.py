"""Time contenders against each other in one process: interleaved rounds, process CPU time, median ratios.

CPU time of the process (all threads) is less sensitive to other programs than wall-clock time. Ratios are taken within
a round, so that changes over time (frequency, caches) affect both sides equally.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Ratio:
    """Median over the rounds with lower and upper quartile."""

    median: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass
class Timings:
    """`seconds[name][i]`: CPU time of contender `name` in round i; `units[name][i]`: its work, such as tokens."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    units: dict[str, list[float]] = field(default_factory=dict)

    def rate(self, name: str) -> float:
        """Units per second of CPU time, median over the rounds."""
        return statistics.median(done / spent for done, spent in zip(self.units[name], self.seconds[name], strict=True))

    def ratio(self, name: str, other: str) -> Ratio:
        """Time per unit of `name` over that of `other` in the same round; below 1, `name` is faster."""
        ratios = [mine / theirs for mine, theirs in zip(self._per_unit(name), self._per_unit(other), strict=True)]
        low, median, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return Ratio(median, low, high)

    def _per_unit(self, name: str) -> list[float]:
        return [spent / done for spent, done in zip(self.seconds[name], self.units[name], strict=True)]


def interleave(
    contenders: Mapping[str, Callable[[], float]],
    rounds: int,
    warmup: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> Timings:
    """Run all contenders in each round, each time in a rotated order; a contender returns its units of work.

    `clock`: set it for work outside this process, such as `time.perf_counter` for a GPU.
    """
    timings = Timings({name: [] for name in contenders}, {name: [] for name in contenders})
    names = list(contenders)
    gc.freeze()  # exclude existing objects from garbage collection, which would take longer than some of the timed work
    for index in range(-warmup, rounds):
        turn = index % len(names)
        for name in names[turn:] + names[:turn]:
            gc.collect()
            started = clock()
            units = contenders[name]()
            spent = clock() - started
            if index >= 0:
                timings.seconds[name].append(spent)
                timings.units[name].append(units)
    gc.unfreeze()
    return timings


def machine() -> dict[str, Any]:
    """The machine and software of the measurement."""
    import torch
    import transformers

    from rlframework.observers.host import cpu_name

    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def table(rows: list[list[str]]) -> str:
    """Format rows as a table; the first row is the header."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "  ".join("-" * width for width in widths), *lines[1:]])


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    """Write `data` as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
