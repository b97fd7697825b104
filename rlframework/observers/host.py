"""This machine's processor, memory and GPUs, read from system files and nvidia-smi, without initialising CUDA."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

_CPUINFO, _CGROUP = Path("/proc/cpuinfo"), Path("/sys/fs/cgroup")
_SECONDS = 20.0


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine, with its memory in bytes."""

    name: str
    memory_bytes: int
    free_bytes: int


def cpu_name() -> str:
    """The processor's model, or its architecture if the model is unknown."""
    text = _CPUINFO.read_text() if _CPUINFO.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def package_version(distribution: str) -> str:
    """The installed version of `distribution`, or "not installed"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def total_memory() -> int:
    """Memory in bytes that processes may use, respecting a container's limit."""
    return int(min(psutil.virtual_memory().total, _cgroup("memory.max") or sys.maxsize))


def available_memory() -> int:
    """Memory in bytes that is free or can be freed now, respecting a container's limit."""
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    in_container = sys.maxsize if limit is None or used is None else max(limit - used, 0)
    return int(min(psutil.virtual_memory().available, in_container))


def free_disk(path: Path) -> int:
    """Free disk space in bytes at `path`, which need not exist yet."""
    path = path.absolute()
    return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free


def gpus() -> list[Gpu]:
    """The GPUs that `nvidia-smi` lists (empty if none), restricted to CUDA_VISIBLE_DEVICES if that holds numbers."""
    query = ["nvidia-smi", "--query-gpu=name,memory.total,memory.free", "--format=csv,noheader,nounits"]
    rows = [[part.strip() for part in line.split(",")] for line in (command_output(query) or "").splitlines()]
    found = [
        Gpu(name, int(total) << 20, int(free) << 20)
        for name, total, free in (row for row in rows if len(row) == 3)
        if total.isdigit() and free.isdigit()  # a MIG slice may report [N/A]
    ]
    numbers = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if all(number.isdigit() for number in numbers):
        return [found[int(number)] for number in numbers if int(number) < len(found)]
    return found


def command_output(command: list[str]) -> str | None:
    """The standard output of a short command; None if it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


def _cgroup(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
