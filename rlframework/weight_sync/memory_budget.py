"""How much memory a refit may take, and how much of it a group of weights does."""

from __future__ import annotations

import torch

_SHARE = 0.8
"""Of the memory that is free."""

BUFFERS = 3
"""Groups of weights that lie in memory at a time."""

CPU_GROUP, GPU_GROUP = 32 << 20, 1 << 30
"""Bytes of a group where the configuration does not say: on a CPU what stays in its caches between the two copies."""


OFFERED_GROUP = 128 << 20
"""The same where weights are written to their place at once: nothing is kept, and each group costs some calls."""


def free_bytes(device: torch.device) -> float:
    """Bytes that a group of weights may have on `device`, of which there are `BUFFERS` at a time."""
    if device.type == "cuda":
        free: float = torch.cuda.mem_get_info(device)[0]
    else:
        free = _available()
    return free * _SHARE / BUFFERS


def group_bytes(buffer_mb: float | None, device: torch.device) -> float:
    """Bytes of a group, as `generation.refit.buffer_mb` says, at most what is free."""
    default = GPU_GROUP if device.type == "cuda" else CPU_GROUP
    return min(free_bytes(device), default if buffer_mb is None else buffer_mb * 2**20)


def _available() -> float:
    """Of this machine's memory, as Linux tells it; elsewhere no limit is known."""
    try:
        with open("/proc/meminfo") as file:
            return float(next(line for line in file if line.startswith("MemAvailable:")).split()[1]) * 1024
    except (OSError, StopIteration):
        return float("inf")
