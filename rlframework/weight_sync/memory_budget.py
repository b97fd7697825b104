"""The memory that a refit and each group of weights in it may use."""

from __future__ import annotations

import torch

from rlframework.observers.host import available_memory

_USABLE = 0.8
"""Fraction of the free memory that a refit may use."""

BUFFERS = 3
"""Groups of weights in memory at the same time."""

CPU_GROUP, GPU_GROUP = 32 << 20, 1 << 30
"""Default bytes per group. A group on a CPU is small enough to stay in its caches between the two copies."""

OFFERED_GROUP = 128 << 20
"""Default bytes per group written straight into an engine's memory: large, as it needs no buffers and saves calls."""


def free_bytes(device: torch.device) -> float:
    """Return the bytes that each of `BUFFERS` groups of weights may use on `device`."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else available_memory()
    return float("inf") if free is None else free * _USABLE / BUFFERS


def group_bytes(buffer_mb: float | None, device: torch.device) -> float:
    """Return the bytes per group: `generation.refit.buffer_mb` or the default, limited by free memory."""
    default = GPU_GROUP if device.type == "cuda" else CPU_GROUP
    return min(free_bytes(device), default if buffer_mb is None else buffer_mb * 2**20)
