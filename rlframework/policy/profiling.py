"""The framework's phases in traces of a profiler, and the time of waiting for a device.

`rlframework.policy.reporting` starts the profiler.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

FORWARD = "rlframework: forward of a microbatch"
"""Name of a microbatch's forward in traces."""
LOSS = "rlframework: loss"
BACKWARD = "rlframework: backward of a microbatch"
"""Name of a microbatch's backward in traces."""
CLIP_AND_STEP = "rlframework: clip and step"
WAIT = "rlframework: wait for the device"
GATHER = "rlframework: gather a weight"
"""Name of the gathering of a weight in traces."""
GENERATE = "rlframework: generate"


def trace_span(name: str) -> AbstractContextManager[None]:
    """Record the enclosed work under `name` in traces of torch's and NVIDIA's profilers; free while none is active."""
    import torch

    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    return torch.profiler.record_function(name)


class DeviceWait:
    """Measures how long a program on the host waits for its device."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the time within the context, in which the program reads a value from the device."""
        started = time.perf_counter()
        with trace_span(WAIT):
            yield
        self._seconds += time.perf_counter() - started

    def pop(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds
