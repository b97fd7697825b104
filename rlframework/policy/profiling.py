"""The torch profiler of one worker, and the names of the framework's phases in traces.

Traces are written to disk for Perfetto and Chrome. Not supported: aggregating a trace, and tracing the driver if the
workers are separate processes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from rlframework.errors import NotSupported
from rlframework.files import write_atomically

FORWARD = "rlframework: forward of a microbatch"
LOSS = "rlframework: loss"
BACKWARD = "rlframework: backward of a microbatch"
CLIP_AND_STEP = "rlframework: clip and step"
GATHER = "rlframework: gather a weight"
GENERATE = "rlframework: generate"


def trace_span(name: str) -> AbstractContextManager[None]:
    """Record the enclosed work under `name` in traces of torch's and NVIDIA's profilers; free while none is active."""
    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    inside: AbstractContextManager[None] = record_function(name)
    return inside


class TraceProfiler:
    """Starts and stops the torch profiler of this process; torch allows only one at a time."""

    def __init__(self) -> None:
        self._running: profile | None = None

    def start(self, *, with_stack: bool, record_shapes: bool, memory: bool) -> None:
        """Start recording operations; raise `NotSupported` if this profiler is already active."""
        if self._running is not None:
            raise NotSupported("this worker is already being profiled; call stop_profiling first")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._running = profile(
            activities=activities,
            record_shapes=record_shapes,
            profile_memory=memory,
            with_stack=with_stack,
            acc_events=True,  # avoids torch's warning about a future default
        )
        self._running.start()

    def stop(self, path: str | Path | None) -> bool:
        """Stop recording and write the trace (gzipped JSON) to `path` atomically; None discards it.

        Returns False if the profiler was not active. Raises a `UserError` if the file cannot be written.
        """
        profiler, self._running = self._running, None
        if profiler is None:
            return False
        profiler.stop()
        if path is not None:
            with TemporaryDirectory() as folder:
                trace = Path(folder, "trace.json.gz")  # torch compresses if the name ends in .gz
                profiler.export_chrome_trace(str(trace))
                write_atomically(path, trace.read_bytes())
        return True
