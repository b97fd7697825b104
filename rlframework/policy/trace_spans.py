"""Names in a trace for what the framework does: see `profiling`. Any profiler of torch or NVIDIA's shows them."""

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


def span(name: str) -> AbstractContextManager[None]:
    """What is done inside stands in a trace under `name`. Nothing where no profiler is on."""
    if not torch._C._autograd._profiler_enabled():
        return nullcontext()
    inside: AbstractContextManager[None] = record_function(name)
    return inside
