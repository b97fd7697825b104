"""A worker's report on itself: device, memory, environment; and its profilers.

`PolicyWorkerBase` derives from `Reporting`. Memory is the allocator's on a GPU, and the whole process's on a CPU.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from rlframework.batch.batched_data_dict import BatchedDataDict
from rlframework.config.policy import PolicyConfig
from rlframework.errors import NotSupported
from rlframework.interfaces.policy_worker import PolicyWorker
from rlframework.interfaces.worker_group import WorkerContext
from rlframework.policy.engine import Engine
from rlframework.policy.profiling import TraceProfiler

REPORTED_VARIABLES = ("LOCAL_RANK", "RANK", "WORLD_SIZE")
"""Environment variables that `get_gpu_info` reports, besides those beginning with CUDA."""


class Reporting(Engine, PolicyWorker, ABC):
    """Calls that inspect a worker without changing its state."""

    config: PolicyConfig
    context: WorkerContext
    device: torch.device
    _profiler: TraceProfiler

    @abstractmethod
    def _batching_mode(self, data: BatchedDataDict[Any] | None = None) -> str:
        """Return how rows are grouped into microbatches: "padded", "dynamic" or "packed"."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}[rank={self.context.rank}]"

    def is_alive(self) -> bool:
        """See `PolicyWorker.is_alive`."""
        return True

    def get_info(self) -> dict[str, Any]:
        """See `PolicyWorker.get_info`."""
        import transformers

        memory = self._memory()
        return {
            "rank": self.context.rank,
            "world_size": self.context.world_size,
            "pid": os.getpid(),
            "device": str(self.device),
            "device_name": self._device_name(),
            "memory_bytes": memory["memory_allocated"],
            "peak_memory_bytes": memory["peak_memory_allocated"],
            "threads": torch.get_num_threads(),
            "batching": self._batching_mode(),
            "preferred_tokens": self.preferred_tokens(),
            "pad_multiple": self.microbatch_rule().pad_multiple,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }

    def get_gpu_info(self) -> dict[str, Any]:
        """See `PolicyWorker.get_gpu_info`."""
        on_gpu = self.device.type == "cuda"
        variables = {name for name in os.environ if name.startswith("CUDA") or name in REPORTED_VARIABLES}
        return {
            "rank": self.context.rank,
            "world_size": self.context.world_size,
            "local_rank": self.context.local_rank,
            "local_device_id": self.device.index if on_gpu else None,
            "global_device_id": self.report_device_id(),
            "device_count": torch.cuda.device_count() if on_gpu else 0,
            "device_name": self._device_name(),
            **{f"{name}_mb": size / 2**20 for name, size in self._memory().items()},
            "parameter_sample": self._parameter_sample(),
            "env_vars": {name: os.environ[name] for name in sorted(variables)},
        }

    def report_device_id(self) -> str:
        """See `PolicyWorker.report_device_id`."""
        if self.device.type == "cuda":
            return f"GPU-{torch.cuda.get_device_properties(self.device).uuid}"
        return f"CPU-{socket.gethostname()}-{os.getpid()}"

    def reset_peak_memory_stats(self) -> None:
        """See `PolicyWorker.reset_peak_memory_stats`."""
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
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
        self,
        ranks: tuple[int, ...] | None = None,
        with_stack: bool = False,
        record_shapes: bool = False,
        memory: bool = False,
    ) -> None:
        """See `PolicyWorker.start_profiling`."""
        if ranks is None or self.context.rank in ranks:
            self._profiler.start(with_stack=with_stack, record_shapes=record_shapes, memory=memory)

    def stop_profiling(self, folder: str | None) -> str | None:
        """See `PolicyWorker.stop_profiling`."""
        path = None if folder is None else Path(folder) / f"rank-{self.context.rank}.json.gz"
        return str(path) if self._profiler.stop(path) and path is not None else None

    def _require_gpu(self) -> None:
        if self.device.type != "cuda":
            raise NotSupported(
                f"a range of the CUDA profiler needs a GPU, and this worker runs on {self.device}; start_profiling and "
                "the section `profiler` of a run work on any device"
            )

    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def _memory(self) -> dict[str, int]:
        """Memory in bytes; on a CPU, resident memory is reported as allocated and as reserved."""
        if self.device.type == "cuda":
            return {
                "memory_allocated": torch.cuda.memory_allocated(self.device),
                "memory_reserved": torch.cuda.memory_reserved(self.device),
                "peak_memory_allocated": torch.cuda.max_memory_allocated(self.device),
                "peak_memory_reserved": torch.cuda.max_memory_reserved(self.device),
            }
        now = resident_bytes()
        peak = max(peak_resident_bytes(), now)  # the kernel updates the two separately, with a delay
        return {
            "memory_allocated": now,
            "memory_reserved": now,
            "peak_memory_allocated": peak,
            "peak_memory_reserved": peak,
        }

    def _parameter_sample(self) -> dict[str, Any]:
        """The first weight, whole, under the name that `save_pretrained` writes."""
        name, spec = next(iter(self.weight_specs().items()))
        return {"name": name, "device": str(self.device), "shape": list(spec.shape), "dtype": str(spec.dtype)}


def resident_bytes() -> int:
    """Return the resident memory of this process in bytes (0 if the system does not report it)."""
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except FileNotFoundError:  # not Linux
        return 0


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
