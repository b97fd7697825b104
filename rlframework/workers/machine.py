"""The machine that workers run on: cores, threads, and the environment variables that processes inherit."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlframework.errors import ConfigError

FORWARDED = ("RLFRAMEWORK_DISABLE_PLUGINS", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Environment variables that workers get from the driver, besides those that `worker_environment` sets."""

INHERITED = ("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LD_LIBRARY_PATH", "USER")
"""Environment variables that a child process inherits from the driver, besides `FORWARDED`; all others are dropped."""
INHERITED_PREFIXES = ("LC_", "XDG_", "CUDA_", "NCCL_", "TORCH", "PYTORCH_", "TRITON_", "GLOO_")
"""Prefixes of further inherited variables: the settings of libraries that do not read rlframework's configuration."""
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY)$", re.IGNORECASE)


def cpu_count() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_cores(workers: int) -> None:
    """Raise a `ConfigError` if there are more workers than cores."""
    cores = cpu_count()
    if workers > cores:
        raise ConfigError(
            f"worker_group.num_workers={workers}, but this process may use {cores} CPU core(s): set at most {cores}"
        )


def check_gpus(workers: int, gpus: int) -> None:
    """Raise a `ConfigError` if there are more workers than the `gpus` that can be used."""
    if workers > gpus:
        raise ConfigError(
            f"worker_group.num_workers={workers} on device cuda, but there are {gpus} GPU(s): set at most "
            f"{gpus}, make more visible with CUDA_VISIBLE_DEVICES, or set device=cpu"
        )


def inherited_environment(names: Iterable[str] = (), prefixes: tuple[str, ...] = ()) -> dict[str, str]:
    """The environment variables that a child process inherits: `INHERITED`, `names`, and those with one of `prefixes`.

    A variable that matches a prefix but ends like a secret (`NCCL_TOKEN`) is dropped unless it is named.
    """
    named = {*INHERITED, *names}
    return {
        name: value
        for name, value in os.environ.items()
        if name in named or (name.startswith(INHERITED_PREFIXES + prefixes) and not _SECRET.search(name))
    }


def worker_environment(
    workers: int,
    environment: Mapping[str, str] | None = None,
    pass_environment: Iterable[str] = (),
    *,
    cores: int | None = None,
    one_machine: bool = True,
) -> dict[str, str]:
    """The environment variables of each of `workers` workers on a machine. Nothing else is copied from the driver.

    `pass_environment` names variables to copy from the driver; the values in `environment` take precedence. `cores` is
    the number of cores of the workers' machine (default: this machine). With `one_machine`, the workers open no port to
    other machines.
    """
    variables = {name: os.environ[name] for name in (*FORWARDED, *pass_environment) if name in os.environ}
    variables.setdefault("RLFRAMEWORK_DISABLE_PLUGINS", "")
    variables["OMP_NUM_THREADS"] = str(threads_per_worker(workers, cores))
    variables["PYTHONPATH"] = os.pathsep.join(import_path())
    if "GLOO_SOCKET_IFNAME" in os.environ:
        variables["GLOO_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"]
    elif one_machine and sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return variables | dict(environment or {})


def threads_per_worker(workers: int, cores: int | None = None) -> int:
    """OMP_NUM_THREADS if the user set it; otherwise an equal share of `cores` (default: those of this machine)."""
    requested = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(requested) if requested.isdigit() else (cores or cpu_count()) // workers)


def import_path() -> list[str]:
    """The driver's `sys.path` without installed packages, so that workers import the same sources."""
    standard = {Path(sysconfig.get_path(name)).resolve() for name in ("stdlib", "platstdlib")}
    entries = dict.fromkeys(Path(entry or ".").resolve() for entry in sys.path)
    return [
        str(entry)
        for entry in entries
        if entry.is_dir()
        and entry.name not in ("site-packages", "dist-packages")
        and not standard.intersection((entry, *entry.parents))
    ]


def identity() -> str:
    """An identifier shared by exactly the processes that can see each other's process ids; empty if unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def listen_for_gloo_at(address: str) -> None:
    """Let gloo in this process listen at `address`, not at the one that the host name resolves to, unless it is set."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if address and any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
