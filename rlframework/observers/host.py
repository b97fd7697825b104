"""This machine's processor, memory and GPUs, read from system files and nvidia-smi, without initialising CUDA."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_CPUINFO, _MEMINFO, _CGROUP = Path("/proc/cpuinfo"), Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_SECONDS = 20.0


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine, with its memory in bytes."""

    name: str
    memory_bytes: int
    free_bytes: int


def cpu_name() -> str:
    """The processor's model, or its architecture if the model is unknown."""
    return _field(_CPUINFO, "model name") or platform.processor() or platform.machine()


def package_version(distribution: str) -> str:
    """The installed version of `distribution`, or "not installed"."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return "not installed"


def total_memory() -> int | None:
    """Memory in bytes that processes may use, respecting a container's limit; None if unknown."""
    return _least(_meminfo("MemTotal"), _cgroup("memory.max"))


def available_memory() -> int | None:
    """Memory in bytes that is free or can be freed now, respecting a container's limit; None if unknown."""
    limit, used = _cgroup("memory.max"), _cgroup("memory.current")
    in_container = None if limit is None or used is None else max(limit - used, 0)
    return _least(_meminfo("MemAvailable"), in_container)


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


def _meminfo(name: str) -> int | None:
    kilobytes = _field(_MEMINFO, name)
    return int(kilobytes.split()[0]) << 10 if kilobytes else None


def _cgroup(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _field(file: Path, name: str) -> str:
    """The first value of `name` in lines of the form `name: value`; empty if there is none."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return ""
    return next((value.strip() for key, _, value in (line.partition(":") for line in lines) if key.strip() == name), "")


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)
