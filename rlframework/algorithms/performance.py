"""The metrics of a step that tell how well its workers use their devices: speed, model FLOPs utilization, memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

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
