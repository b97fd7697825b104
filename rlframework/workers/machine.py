"""The machine that workers run on: its cores and ports, and the environment variables that processes inherit."""

from __future__ import annotations

import os
import random
import socket
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

import psutil

from rlframework.base.errors import ConfigError, WorkerError
from rlframework.base.logs import LEVEL_VARIABLE
from rlframework.base.secrets import is_secret_name

FORWARDED = ("RLFRAMEWORK_DISABLE_PLUGINS", "HF_HOME", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE")
"""Environment variables that workers get from the driver, besides those that `worker_environment` sets."""

INHERITED = ("PATH", "HOME", "TMPDIR", "TZ", "LANG", "LD_LIBRARY_PATH", "USER")
"""Environment variables that a child process inherits from the driver, besides `FORWARDED`; all others are dropped."""
INHERITED_PREFIXES = ("LC_", "XDG_", "CUDA_", "NCCL_", "TORCH", "PYTORCH_", "TRITON_", "GLOO_")
"""Prefixes of further inherited variables: the settings of libraries that do not read rlframework's configuration."""
_LOWEST_PORT = 20000


def python_path(python: str | None) -> str | None:
    """Return the path of a Python that a configuration names, absolute because workers have other folders.

    `~` is the home of this process. A bare name stays, to be found by each node's PATH.
    """
    return os.path.abspath(os.path.expanduser(python)) if python and os.path.dirname(python) else python


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

    A variable that matches a prefix but is named like a secret (`NCCL_TOKEN`) is dropped unless it is named.
    """
    named = {*INHERITED, *names}
    return {
        name: value
        for name, value in os.environ.items()
        if name in named or (name.startswith(INHERITED_PREFIXES + prefixes) and not is_secret_name(name))
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
    copied = (*FORWARDED, LEVEL_VARIABLE, *pass_environment)
    variables = {name: os.environ[name] for name in copied if name in os.environ}
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


def threads_of(environment: Mapping[str, str]) -> int | None:
    """OMP_NUM_THREADS of this environment; None if it is not one number."""
    threads = environment["OMP_NUM_THREADS"]
    return int(threads) if threads.isdigit() else None


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
    for name, addresses in psutil.net_if_addrs().items():
        if address and any(each.address == address for each in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


class PortReserver:
    """Reserves ports of the machine it runs on. Cheap to construct; runs as an actor to reserve them elsewhere.

    A port that was only looked up can be taken by another process before it is used. A reserved port is held by a bound
    socket: no other socket can bind it, except one that requests exactly this port with SO_REUSEADDR, as the stores of
    `torch.distributed` do.
    """

    def __init__(self) -> None:
        self._reserved: list[socket.socket] = []

    def reserve(self, address: str) -> int:
        """Return a free port of `address`, reserved for the lifetime of this object (except on macOS)."""
        reserved = bind_free_port(address)
        port = int(reserved.getsockname()[1])
        # set only after binding: a socket bound with this option could share the port of another one that also has it
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if sys.platform == "linux":
            self._reserved.append(reserved)
        else:  # where the option does not let another socket bind the port
            reserved.close()
        return port


def bind_free_port(address: str) -> socket.socket:
    """Return a socket bound to a free port of `address`; raises `WorkerError` if none is found.

    The port is below the kernel's ephemeral range, so that no other connection of this machine takes it between its
    release and its use.
    """
    highest = first_ephemeral_port() - 1
    for port in random.SystemRandom().sample(range(_LOWEST_PORT, highest + 1), 100):
        candidate = socket.socket()
        try:
            candidate.bind((address, port))
        except OSError:
            candidate.close()
        else:
            return candidate
    raise WorkerError(f"found no free port between {_LOWEST_PORT} and {highest} on {address} in 100 attempts")


def first_ephemeral_port() -> int:
    """The first port of the kernel's ephemeral range."""
    try:
        first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except OSError:  # not Linux: IANA's range
        return 49152
    return first if first > _LOWEST_PORT + 1000 else 61000
