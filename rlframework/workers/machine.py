"""This machine as workers find it: cores, threads, and the environment variables that are passed on."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from rlframework.errors import ConfigError

PASSED_ON = ("RLFRAMEWORK_DISABLE_PLUGINS", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Environment variables that workers get from the driver, besides those that `worker_environment` makes."""

KEPT = ("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LD_LIBRARY_PATH", "USER")
"""Variables of the driver that a process which it starts keeps, besides `PASSED_ON`; all others go."""
KEPT_BEGINNINGS = ("LC_", "XDG_", "CUDA_", "NCCL_", "TORCH", "PYTORCH_", "TRITON_", "GLOO_")
"""The same, by how they begin: the settings of those who read no configuration of ours."""
_SECRET = re.compile(r"(TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?|API_?KEY|ACCESS_KEY|PRIVATE_KEY)$", re.IGNORECASE)


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


def kept_environment(names: Iterable[str] = (), beginnings: tuple[str, ...] = ()) -> dict[str, str]:
    """What a process that this one starts keeps of its environment: `KEPT`, and what else is named or begins like this.

    What begins like a setting and ends like a secret (`NCCL_TOKEN`) stays here, unless it is named.
    """
    named = {*KEPT, *names}
    return {
        name: value
        for name, value in os.environ.items()
        if name in named or (name.startswith(KEPT_BEGINNINGS + beginnings) and not _SECRET.search(name))
    }


def worker_environment(
    workers: int,
    environment: Mapping[str, str] | None = None,
    pass_environment: Iterable[str] = (),
    *,
    cores: int | None = None,
    one_machine: bool = True,
) -> dict[str, str]:
    """The environment variables of one of `workers` workers on a machine, by name: nothing else is copied.

    `pass_environment` are names of the driver's, `environment` are given values, which count most. `cores` are those of
    the workers' machine (default: this one). On `one_machine` no port of theirs is open to others.
    """
    passed = {name: os.environ[name] for name in (*PASSED_ON, *pass_environment) if name in os.environ}
    passed.setdefault("RLFRAMEWORK_DISABLE_PLUGINS", "")
    passed["OMP_NUM_THREADS"] = str(threads_per_worker(workers, cores))
    passed["PYTHONPATH"] = os.pathsep.join(import_path())
    if "GLOO_SOCKET_IFNAME" in os.environ:
        passed["GLOO_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"]
    elif one_machine and sys.platform == "linux":
        passed["GLOO_SOCKET_IFNAME"] = "lo"
    return passed | dict(environment or {})


def threads_per_worker(workers: int, cores: int | None = None) -> int:
    """OMP_NUM_THREADS where the user set it; otherwise an equal share of the cores (default: of this machine)."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    return max(1, int(asked) if asked.isdigit() else (cores or cpu_count()) // workers)


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


def identity() -> str:
    """What processes of one machine, which can see each other's ids, have in common, and no others; empty: unknown."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return ""


def interface_of(address: str) -> str | None:
    """The network interface of this machine that has the IPv4 `address`; None where that cannot be told."""
    if sys.platform != "linux":
        return None
    import fcntl
    import socket
    import struct

    ask_address = 0x8915  # SIOCGIFADDR
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):  # it has no IPv4 address
                answer = fcntl.ioctl(asking.fileno(), ask_address, struct.pack("256s", name.encode()[:15]))
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return None
