"""The names of the framework's phases in traces of a profiler, which `policy.reporting` starts and stops."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function

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
    return record_function(name)
