"""This machine as workers find it: cores, threads, and the environment variables that are passed on."""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path

from rlframework.errors import ConfigError

PASSED_ON = ("RLFRAMEWORK_DISABLE_PLUGINS", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Environment variables that workers get from the driver, besides those that `worker_environment` makes."""


def cpu_count() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_cores(workers: int) -> None:
    """A `ConfigError` when there are more workers than cores."""
    cores = cpu_count()
    if workers > cores:
        raise ConfigError(
            f"worker_group.num_workers={workers}, but this process may use {cores} CPU core(s): set at most {cores}"
        )


def worker_environment(workers: int) -> dict[str, str]:
    """The environment variables of a worker on this machine, by name: nothing else is copied."""
    passed = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    passed.setdefault("RLFRAMEWORK_DISABLE_PLUGINS", "")
    passed["OMP_NUM_THREADS"] = str(threads_per_worker(workers))
    passed["PYTHONPATH"] = os.pathsep.join(import_path())
    if sys.platform == "linux":  # all workers are on this machine: no port of theirs is open to others
        passed["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return passed


def threads_per_worker(workers: int) -> int:
    """OMP_NUM_THREADS where the user set it; otherwise an equal share of the cores, at least one."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(asked) if asked.isdigit() else cpu_count() // workers)


def import_path() -> list[str]:
    """The driver's `sys.path` without the packages that a Python has installed: workers find the same sources."""
    standard = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    entries = dict.fromkeys(Path(entry or ".").resolve() for entry in sys.path)
    return [
        str(entry)
        for entry in entries
        if entry.is_dir()
        and entry.name not in ("site-packages", "dist-packages")
        and not standard.intersection((entry, *entry.parents))
    ]
