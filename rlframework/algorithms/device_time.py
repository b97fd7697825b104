"""The time of a device in a profiled step: computing, communicating, copying, idle. Read from torch's traces."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

Kind = Literal["compute", "communication", "copies"]
Interval = tuple[float, float]
"""Start and end."""

_GPU_KINDS: Mapping[str, Kind] = {"kernel": "compute", "gpu_memcpy": "copies", "gpu_memset": "copies"}
_COMMUNICATION_KERNEL = re.compile(r"nccl|nvshmem|deep_ep", re.IGNORECASE)
_COLLECTIVE = re.compile(r"(gloo:|c10d::|_c10d_functional)")


@dataclass(frozen=True)
class DeviceTime:
    """The seconds of a step on one device.

    `compute`: at least one kernel runs that does not communicate. `communication`: at least one does that communicates,
    and `exposed_communication`: none but such. `copies`: the device only copies or sets memory. `idle`: it does
    nothing. A step is the sum of `compute`, `exposed_communication`, `copies` and `idle`.
    """

    compute: float
    communication: float
    exposed_communication: float
    copies: float
    idle: float

    @property
    def total(self) -> float:
        """The seconds of the step."""
        return self.compute + self.exposed_communication + self.copies + self.idle

    def __str__(self) -> str:
        shares = {name: seconds / (self.total or 1.0) for name, seconds in vars(self).items()}
        return (
            f"{shares['compute']:.0%} compute, {shares['communication']:.0%} communication "
            f"({shares['exposed_communication']:.0%} without compute), {shares['copies']:.0%} copies, "
            f"{shares['idle']:.0%} idle"
        )


def device_time(intervals: Mapping[Kind, Sequence[Interval]], start: float, end: float) -> DeviceTime:
    """Return the time from `start` to `end` by kind; intervals may overlap, also those of one kind."""
    kinds: tuple[Kind, ...] = ("compute", "communication", "copies")
    compute, communication, copies = (
        np.clip(np.asarray(intervals.get(kind) or [(end, end)], dtype=np.float64), start, end) for kind in kinds
    )
    computing, busy = _covered(compute), _covered(np.concatenate((compute, communication)))
    working = _covered(np.concatenate((compute, communication, copies)))
    return DeviceTime(computing, _covered(communication), busy - computing, working - busy, end - start - working)


def _covered(intervals: np.ndarray[Any, Any]) -> float:
    """The length of the union of the intervals `[N, 2]`."""
    starts, ends = intervals[intervals[:, 0].argsort()].T
    reached = np.maximum.accumulate(ends)
    gaps = np.maximum(starts[1:] - reached[:-1], 0.0)
    return float(reached[-1] - starts[0] - gaps.sum())


def read_trace(path: Path) -> DeviceTime | None:
    """Sum up a trace that `PolicyWorker.stop_profiling` wrote; None if it is not on this machine or has no such events.

    Without a GPU, the operators of torch count as compute, gloo's and torch's collectives as communication, and all
    else, such as Python, as idle.
    """
    if not path.exists():
        return None
    trace = json.loads(gzip.decompress(path.read_bytes()))
    kind_of = _kind_on_gpu if trace.get("deviceProperties") else _kind_on_cpu
    intervals: dict[Kind, list[Interval]] = {}
    recording: Interval | None = None
    for event in trace["traceEvents"]:
        if event.get("ph") != "X":
            continue
        interval = event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6
        if event.get("cat") == "Trace":
            recording = interval
        elif kind := kind_of(event):
            intervals.setdefault(kind, []).append(interval)
    return device_time(intervals, *recording) if recording and intervals else None


def _kind_on_gpu(event: Mapping[str, Any]) -> Kind | None:
    kind = _GPU_KINDS.get(event.get("cat", ""))
    return "communication" if kind == "compute" and _COMMUNICATION_KERNEL.search(event["name"]) else kind


def _kind_on_cpu(event: Mapping[str, Any]) -> Kind | None:
    if _COLLECTIVE.match(event["name"]):
        return "communication"
    return "compute" if event.get("cat") == "cpu_op" and event["name"].startswith("aten::") else None
