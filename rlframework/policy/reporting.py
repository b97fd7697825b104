"""A worker's report on itself: device, memory, environment; and its profilers.

Memory is the allocator's on a GPU, and the whole process's on a CPU.
"""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from rlframework.errors import NotSupported
from rlframework.interfaces.policy_worker import WorkerInfo
from rlframework.policy.engine import Engine
from rlframework.policy.microbatching import Microbatching
from rlframework.policy.profiling import TraceProfiler

REPORTED_VARIABLES = ("LOCAL_RANK", "RANK", "WORLD_SIZE")
"""Environment variables that `get_gpu_info` reports, besides those beginning with CUDA."""


class Reporting:
    """Inspects and profiles a worker without changing its state."""

    def __init__(self, engine: Engine, microbatching: Microbatching) -> None:
        self._engine, self._microbatching = engine, microbatching
        self._context, self._device = engine.context, engine.device
        self._profiler = TraceProfiler()

    def info(self) -> WorkerInfo:
        """See `PolicyWorker.get_info`."""
        import transformers

        memory = self._memory()
        return {
            "rank": self._context.rank,
            "world_size": self._context.world_size,
            "pid": os.getpid(),
            "device": str(self._device),
            "device_name": self._device_name(),
            "memory_bytes": memory["memory_allocated"],
            "peak_memory_bytes": memory["peak_memory_allocated"],
            "threads": torch.get_num_threads(),
            "batching": self._microbatching.mode(),
            "preferred_tokens": self._engine.preferred_tokens(),
            "pad_multiple": self._engine.microbatch_rule().pad_multiple,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }

    def gpu_info(self) -> dict[str, Any]:
        """See `PolicyWorker.get_gpu_info`."""
        on_gpu = self._device.type == "cuda"
        variables = {name for name in os.environ if name.startswith("CUDA") or name in REPORTED_VARIABLES}
        return {
            "rank": self._context.rank,
            "world_size": self._context.world_size,
            "local_rank": self._context.local_rank,
            "local_device_id": self._device.index if on_gpu else None,
            "global_device_id": self.device_id(),
            "device_count": torch.cuda.device_count() if on_gpu else 0,
            "device_name": self._device_name(),
            **{f"{name}_mb": size / 2**20 for name, size in self._memory().items()},
            "parameter_sample": self._parameter_sample(),
            "env_vars": {name: os.environ[name] for name in sorted(variables)},
        }

    def device_id(self) -> str:
        """See `PolicyWorker.report_device_id`."""
        if self._device.type == "cuda":
            return f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
        return f"CPU-{socket.gethostname()}-{os.getpid()}"

    def reset_peak_memory(self) -> None:
        """See `PolicyWorker.reset_peak_memory_stats`."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            reset_peak_resident_bytes()

    def start_gpu_profiling(self) -> None:
        """See `PolicyWorker.start_gpu_profiling`."""
        self._require_gpu()
        torch.cuda.profiler.start()

    def stop_gpu_profiling(self) -> None:
        """See `PolicyWorker.stop_gpu_profiling`."""
        self._require_gpu()
        torch.cuda.profiler.stop()

    def start_profiling(
        self, ranks: tuple[int, ...] | None, *, with_stack: bool, record_shapes: bool, memory: bool
    ) -> None:
        """See `PolicyWorker.start_profiling`."""
        if ranks is None or self._context.rank in ranks:
            self._profiler.start(with_stack=with_stack, record_shapes=record_shapes, memory=memory)

    def stop_profiling(self, folder: str | None) -> str | None:
        """See `PolicyWorker.stop_profiling`."""
        path = None if folder is None else Path(folder) / f"rank-{self._context.rank}.json.gz"
        return str(path) if self._profiler.stop(path) and path is not None else None

    def _require_gpu(self) -> None:
        if self._device.type != "cuda":
            raise NotSupported(
                f"a range of the CUDA profiler needs a GPU, and this worker runs on {self._device}; start_profiling "
                "and the section `profiler` of a run work on any device"
            )

    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"

    def _memory(self) -> dict[str, int]:
        """Memory in bytes; on a CPU, resident memory is reported as allocated and as reserved."""
        if self._device.type == "cuda":
            return {
                "memory_allocated": torch.cuda.memory_allocated(self._device),
                "memory_reserved": torch.cuda.memory_reserved(self._device),
                "peak_memory_allocated": torch.cuda.max_memory_allocated(self._device),
                "peak_memory_reserved": torch.cuda.max_memory_reserved(self._device),
            }
        now = psutil.Process().memory_info().rss
        peak = max(peak_resident_bytes(), now)  # the kernel updates the two separately, with a delay
        return {
            "memory_allocated": now,
            "memory_reserved": now,
            "peak_memory_allocated": peak,
            "peak_memory_reserved": peak,
        }

    def _parameter_sample(self) -> dict[str, Any]:
        """The first weight, whole, under the name that `save_pretrained` writes."""
        name, spec = next(iter(self._engine.weight_specs().items()))
        return {"name": name, "device": str(self._device), "shape": list(spec.shape), "dtype": str(spec.dtype)}


def peak_resident_bytes() -> int:
    """Return the peak since the process started or `reset_peak_resident_bytes` (0 if the system does not report it)."""
    with suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    return 0


def reset_peak_resident_bytes() -> None:
    """Reset the peak to the current value. Linux only, and not in some sandboxes: elsewhere the peak is unchanged."""
    with suppress(OSError), open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")
