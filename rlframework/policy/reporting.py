"""A worker's report on itself: device, memory, environment; and its profilers.

Traces are for Perfetto and Chrome; `rlframework.algorithms.performance` sums one up. Not supported: tracing the driver
if the workers are separate processes.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from rlframework.base.errors import NotSupported
from rlframework.base.files import write_atomically, writing
from rlframework.interfaces.policy_worker import WorkerInfo
from rlframework.policy.engine import Engine
from rlframework.policy.microbatching import Microbatching
from rlframework.policy.shared_state import DeviceMemory


class Reporting:
    """Inspects and profiles a worker without changing its state."""

    def __init__(self, engine: Engine, microbatching: Microbatching, memory: DeviceMemory) -> None:
        self._engine, self._microbatching, self._memory = engine, microbatching, memory
        self._context, self._device = engine.context, engine.device
        self._profile: profile | None = None  # torch allows only one in a process

    def info(self) -> WorkerInfo:
        """See `PolicyWorker.get_info`."""
        import transformers

        rule = self._engine.microbatch_rule()
        peak, peak_reserved = self._memory.peak()
        phases: dict[str, int] = {phase: allocated for phase, (allocated, _) in self._memory.peaks().items()}
        return {
            "rank": self._context.rank,
            "world_size": self._context.world_size,
            "pid": os.getpid(),
            "device": str(self._device),
            "device_name": self._device_name(),
            "memory_bytes": self._memory.now()[0],
            "peak_memory_bytes": peak,
            "peak_reserved_bytes": peak_reserved,
            "peak_bytes_by_phase": phases if self._device.type == "cuda" else {},
            "bytes_by_part": self._memory.parts(),
            "threads": torch.get_num_threads(),
            "batching": self._microbatching.batching().name,
            "preferred_tokens": self._engine.preferred_tokens(),
            "pad_multiple": rule.pad_multiple,
            "few_shapes": rule.few_shapes,
            "packs_media": rule.packs_media,
            "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        }

    def gpu_info(self) -> dict[str, Any]:
        """See `PolicyWorker.get_gpu_info`."""
        on_gpu = self._device.type == "cuda"
        variables = {
            name for name in os.environ if name.startswith("CUDA") or name in ("LOCAL_RANK", "RANK", "WORLD_SIZE")
        }
        name, spec = next(iter(self._engine.weight_specs().items()))
        names = ("memory_allocated", "memory_reserved", "peak_memory_allocated", "peak_memory_reserved")
        sizes = (*self._memory.now(), *self._memory.peak())
        sample = {"name": name, "device": str(self._device), "shape": list(spec.shape), "dtype": str(spec.dtype)}
        return {
            "rank": self._context.rank,
            "world_size": self._context.world_size,
            "local_rank": self._context.local_rank,
            "local_device_id": self._device.index if on_gpu else None,
            "global_device_id": self.device_id(),
            "device_count": torch.cuda.device_count() if on_gpu else 0,
            "device_name": self._device_name(),
            **{f"{name}_mb": size / 2**20 for name, size in zip(names, sizes, strict=True)},
            "parameter_sample": sample,  # whole, under the name that `save_pretrained` writes
            "env_vars": {name: os.environ[name] for name in sorted(variables)},
        }

    def device_id(self) -> str:
        """See `PolicyWorker.report_device_id`."""
        if self._device.type == "cuda":
            return f"GPU-{torch.cuda.get_device_properties(self._device).uuid}"
        return f"CPU-{socket.gethostname()}-{os.getpid()}"

    def reset_peak_memory(self) -> None:
        """See `PolicyWorker.reset_peak_memory_stats`."""
        self._memory.reset()

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
        if ranks is not None and self._context.rank not in ranks:
            return
        if self._profile is not None:
            raise NotSupported("this worker is already being profiled; call stop_profiling first")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profile = profile(
            activities=activities,
            record_shapes=record_shapes,
            profile_memory=memory,
            with_stack=with_stack,
            acc_events=True,  # avoids torch's warning about a future default
        )
        self._profile.start()

    def stop_profiling(self, folder: str | None) -> str | None:
        """See `PolicyWorker.stop_profiling`. The trace is gzipped JSON, written atomically."""
        active, self._profile = self._profile, None
        if active is None:
            return None
        active.stop()
        if folder is None:
            return None
        path = Path(folder, f"rank-{self._context.rank}.json.gz")
        with writing(path), TemporaryDirectory() as temporary:
            trace = Path(temporary, "trace.json.gz")  # torch compresses if the name ends in .gz
            active.export_chrome_trace(str(trace))
            write_atomically(path, trace.read_bytes())
        return str(path)

    def _require_gpu(self) -> None:
        if self._device.type != "cuda":
            raise NotSupported(
                f"a range of the CUDA profiler needs a GPU, and this worker runs on {self._device}; start_profiling "
                "and the section `profiler` of a run work on any device"
            )

    def _device_name(self) -> str:
        return torch.cuda.get_device_name(self._device) if self._device.type == "cuda" else "cpu"
