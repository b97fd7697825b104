"""This machine's processor, memory and GPUs, read from system files and nvidia-smi, without initialising CUDA."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

_MEMINFO, _CGROUP = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
_SECONDS = 20.0


@dataclass(frozen=True)
class Gpu:
    """A GPU of this machine, with its memory in bytes."""

    name: str
    memory_bytes: int
    free_bytes: int


def cpu_name() -> str:
    """The processor's model, or its architecture if the model is unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


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
    text = command_output(query)
    found = [_gpu(line) for line in (text or "").splitlines() if line.count(",") == 2]
    known = [gpu for gpu in found if gpu is not None]
    numbers = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    if all(number.isdigit() for number in numbers):
        return [known[int(number)] for number in numbers if int(number) < len(known)]
    return known


def command_output(command: list[str]) -> str | None:
    """The standard output of a short command; None if it does not exist or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None
    return done.stdout


def _gpu(line: str) -> Gpu | None:
    name, total, free = (part.strip() for part in line.split(","))
    if not (total.isdigit() and free.isdigit()):
        return None  # a MIG slice may report [N/A]
    return Gpu(name, int(total) << 20, int(free) << 20)


def _meminfo(name: str) -> int | None:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:")), None)


def _cgroup(name: str) -> int | None:
    try:
        text = (_CGROUP / name).read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _least(*values: int | None) -> int | None:
    return min((value for value in values if value is not None), default=None)
