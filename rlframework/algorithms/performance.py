"""How well workers use their devices in a step: speed, model FLOPs utilization, memory, and time in profiled steps.

The latter is read from torch's traces: computing, communicating, copying, idle.
"""

from __future__ import annotations

import gc
import gzip
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rlframework.interfaces.policy_worker import TrainResult, WorkerInfo

MIB = 2**20


def performance_metrics(
    trained: Sequence[TrainResult],
    workers: Sequence[WorkerInfo],
    *,
    tokens: float | None,
    seconds: float,
    peak_flops: float | None,
) -> dict[str, float]:
    """Return the metrics of a step of `seconds`, in which the calls of `Policy.train` returned `trained`.

    `tokens`: those of the rows trained on, if known. `peak_flops`: FLOP/s that a worker's device can reach (None: those
    of its GPU, if `gpu_models` knows it).
    """
    found = memory_metrics(workers)
    if tokens is not None:
        found["throughput/tokens_per_second"] = tokens / seconds
        found["throughput/tokens_per_second_per_worker"] = tokens / seconds / len(workers)
    flops = sum(result["flops"] for result in trained) if all("flops" in result for result in trained) else 0.0
    if flops:  # not a step without rows in the loss
        reached = flops / sum(result["times"]["train"] for result in trained) / len(workers)
        found["throughput/model_tflops_per_worker"] = reached / 1e12
        if peak := peak_flops or known_peak(workers):
            found["throughput/mfu"] = reached / peak
    waits = [result["times"]["device_wait"] for result in trained if "device_wait" in result["times"]]
    return found | ({"time/device/wait": sum(waits)} if waits else {})


def known_peak(workers: Sequence[WorkerInfo]) -> float | None:
    """Return the mean peak FLOP/s of the workers' GPUs; None if one has no known GPU."""
    names = [info.get("device_name", "cpu") for info in workers]
    if "cpu" in names:
        return None
    from rlframework.base.gpu_models import gpu_model

    models = [gpu_model(name) for name in names]
    peaks = [model.bf16_flops for model in models if model is not None]
    return sum(peaks) / len(peaks) if peaks and len(peaks) == len(models) else None


def memory_metrics(workers: Sequence[WorkerInfo]) -> dict[str, float]:
    """Return the memory in MiB of the worker with the highest peak: its peak, by phase, and by what it held."""
    measured = [info for info in workers if "peak_memory_bytes" in info]
    if not measured:
        return {}
    worker = max(measured, key=lambda info: info["peak_memory_bytes"])
    sizes = {
        "peak": worker["peak_memory_bytes"],
        **{f"peak_{phase}": size for phase, size in worker.get("peak_bytes_by_phase", {}).items()},
        **worker.get("bytes_by_part", {}),
    }
    if "peak_reserved_bytes" in worker and not worker["device"].startswith("cpu"):
        sizes["peak_reserved"] = worker["peak_reserved_bytes"]
    return {f"memory/{name}_mb": size / MIB for name, size in sizes.items()}


@contextmanager
def collecting_what_is_new() -> Iterator[None]:
    """Context in which Python's garbage collector does not look at the objects that exist at its beginning.

    These are some 400,000 once torch and transformers are imported, and a full collection takes 0.3 s. The many objects
    of a step with hundreds of engines would cause one in every few steps. Changes nothing in a program that has frozen
    objects itself.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect(1)
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


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
