"""Checks of this machine: Python, processor, memory, disk, limits, network, environment variables."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlframework.doctor.context import Context
from rlframework.doctor.findings import Finding, note, ok, unknown, warning
from rlframework.doctor.registry import check
from rlframework.observers import host
from rlframework.observers.secrets import HIDDEN, is_secret_name
from rlframework.workers.machine import cpu_count

GIB = 2**30
LITTLE_MEMORY = 2 * GIB
LITTLE_DISK = 5 * GIB
FULL_DISK = 0.95
"""Fraction of disk usage above which Ray no longer spills objects to it."""
LITTLE_SHM = GIB
FEW_FILES = 4096
FEW_TASKS = 2048

SHM, _QUOTA, _TASKS = Path("/dev/shm"), Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/pids.max")
_SHOWN_BEGINNINGS = ("RAY_", "NCCL_", "GLOO_", "HF_", "RLFRAMEWORK_", "PYTORCH_", "TORCH_", "WANDB_", "MLFLOW_", "OMP_")
_SHOWN = ("CUDA_VISIBLE_DEVICES", "TRANSFORMERS_OFFLINE", "MASTER_ADDR", "MASTER_PORT", "LD_LIBRARY_PATH", "PYTHONPATH")
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "GRPC_PROXY")


def gib(size: float) -> str:
    """Format bytes in GiB."""
    return f"{size / GIB:,.1f} GiB"


@check("machine", "python")
def python(context: Context) -> Iterator[Finding]:
    """The Python version and its location."""
    version, system = platform.python_version(), f"{platform.system()} {platform.release()} {platform.machine()}"
    yield ok(f"Python {version} at {sys.executable}; {system}", version=version, executable=sys.executable)
    if platform.system() != "Linux":
        yield warning(
            f"rlframework is not tested on {platform.system()}",
            "Use Linux, or worker_group.name=inline; GPUs and Ray clusters need Linux",
        )


@check("machine", "processor")
def processor(context: Context) -> Iterator[Finding]:
    """Available cores, and the CPU quota of a container."""
    cores, quota = cpu_count(), _cpu_quota()
    yield ok(f"{host.cpu_name()}, {cores} core(s) for this process of {os.cpu_count()}", cores=cores, quota=quota)
    if quota is not None and quota < cores:
        yield warning(
            f"this container may use {quota:g} core(s) but sees {cores}: threads will compete",
            f"Set OMP_NUM_THREADS so that workers x threads is at most {max(1, int(quota))}, or raise the quota",
        )


@check("machine", "memory")
def memory(context: Context) -> Iterator[Finding]:
    """RAM, within the limit of a container."""
    total, free = host.total_memory(), host.available_memory()
    if total is None or free is None:
        yield unknown("cannot determine the amount of memory")
        return
    text = f"{gib(total)}, {gib(free)} free"
    if free < LITTLE_MEMORY:
        yield warning(
            text, "Stop other programs, or use a machine with more memory: torch alone takes 0.5 GiB per worker"
        )
    else:
        yield ok(text, total_bytes=total, free_bytes=free)


@check("machine", "disk")
def disk(context: Context) -> Iterator[Finding]:
    """Free space in the output directory, and where Ray and others put temporary files."""
    places = {"working directory": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    if context.config is not None:
        places["output_dir"] = context.config.output_dir
    for name, path in places.items():
        free = host.free_disk(path)
        text = f"{name} ({path}): {gib(free)} free"
        full = 1 - free / shutil.disk_usage(_there(path)).total > FULL_DISK
        if free < LITTLE_DISK or full:
            remedy = "Free some space"
            if name == "temporary files":
                remedy += ", or set TMPDIR and RAY_TMPDIR to another disk; Ray stops writing to a disk that is 95% full"
            yield warning(text, remedy, free_bytes=free)
        else:
            yield ok(text, free_bytes=free)


@check("machine", "shared memory")
def shared_memory(context: Context) -> Iterator[Finding]:
    """Size of /dev/shm, where Ray keeps objects that several workers share."""
    if not SHM.is_dir():
        yield note(f"{SHM} does not exist: Ray keeps its objects in files instead")
        return
    size, free = shutil.disk_usage(SHM).total, shutil.disk_usage(SHM).free
    text = f"{SHM}: {gib(size)}, {gib(free)} free"
    if free >= LITTLE_SHM:
        yield ok(text, total_bytes=size, free_bytes=free)
    elif context.config is not None and not context.uses_group("ray"):
        yield note(f"{text}; too little for Ray, but this run does not use it", total_bytes=size, free_bytes=free)
    else:
        yield warning(
            f"{text}: Ray falls back to slow files, and NCCL may fail",
            f"In a container: docker run --shm-size=8g; otherwise: mount -o remount,size=8G {SHM}, or delete files in "
            f"it",
            total_bytes=size,
            free_bytes=free,
        )


@check("machine", "open files")
def open_files(context: Context) -> Iterator[Finding]:
    """The limit on open files: each Ray worker opens dozens of files and sockets, some in Ray's own processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if 0 <= hard < FEW_FILES:
        yield warning(
            f"at most {hard} open files per process (ulimit -n)",
            "Raise the hard limit to 65536 (limits.conf, LimitNOFILE= of systemd, docker run --ulimit nofile=65536)",
            soft=soft,
            hard=hard,
        )
    elif 0 <= soft < FEW_FILES:
        text = f"{soft} open files per process (ulimit -n), up to {_limit(hard)} on request, which a local Ray makes"
        yield note(text, "Before `ray start`, run: ulimit -n 65536", soft=soft, hard=hard)
    else:
        yield ok(f"{_limit(soft)} open files per process (ulimit -n)", soft=soft, hard=hard)


@check("machine", "processes")
def processes(context: Context) -> Iterator[Finding]:
    """The limit on processes and threads; Ray starts hundreds of threads."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = [limit for limit in (soft if soft >= 0 else None, _tasks_of_container()) if limit is not None]
    least = min(limits, default=None)
    if least is not None and least < FEW_TASKS:
        yield warning(
            f"at most {least} processes and threads (ulimit -u, pids.max of the container)",
            f"Raise the limit to at least {FEW_TASKS} (ulimit -u, docker run --pids-limit)",
            limit=least,
        )
    else:
        text = "no limit on processes and threads" if least is None else f"up to {least} processes and threads"
        yield ok(text, limit=least)


@check("machine", "network")
def network(context: Context) -> Iterator[Finding]:
    """The loopback interface, on which the services of a run listen, and this machine's hostname."""
    try:
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            socket.create_connection(listening.getsockname(), timeout=5).close()
    except OSError as error:
        remedy = "Enable 127.0.0.1 (ip link set lo up, firewall rules): workers connect to each other over it"
        yield context.problem(f"loopback connections fail: {error}", remedy, needed=True)
    else:
        yield ok("loopback works and has free ports")
    name = socket.gethostname()
    try:
        socket.getaddrinfo(name, None)
    except OSError as error:
        yield warning(
            f"the hostname {name!r} does not resolve ({error}): gloo and Ray may not find this machine on a cluster",
            f"Add a line with its address and {name} to /etc/hosts, or set GLOO_SOCKET_IFNAME to its network interface",
        )


@check("machine", "proxies")
def proxies(context: Context) -> Iterator[Finding]:
    """Whether a proxy intercepts connections to this machine's own addresses, which breaks Ray."""
    given = [name for name in _PROXIES if os.environ.get(name)]
    if not given:
        return
    spared = {word.strip() for name in ("no_proxy", "NO_PROXY") for word in os.environ.get(name, "").split(",")}
    if spared & {"127.0.0.1", "*", "127.0.0.0/8"}:
        yield ok(f"{', '.join(given)}: set, but not used for this machine's own addresses")
        return
    yield warning(
        f"{', '.join(given)}: set, but no_proxy lacks 127.0.0.1, so Ray's connections may go to the proxy",
        "Set no_proxy=127.0.0.1,localhost, plus the addresses of the nodes on a cluster",
    )


@check("machine", "variables")
def variables(context: Context) -> Iterator[Finding]:
    """Relevant environment variables; for secrets, only that they are set."""
    names = [name for name in os.environ if name.startswith(_SHOWN_BEGINNINGS) or name in _SHOWN]
    shown = {name: HIDDEN if is_secret_name(name) else os.environ[name] for name in sorted(names)}
    if shown:
        yield ok(", ".join(f"{name}={value}" for name, value in shown.items()), variables=shown)
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        yield note("CUDA_VISIBLE_DEVICES is empty: GPUs are hidden", "Unset it to use GPUs")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads and not threads.isdigit():
        yield warning(f"OMP_NUM_THREADS={threads!r} is not a number and is ignored", "Set it to a number, or unset it")


def _there(path: Path) -> Path:
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def _limit(value: int) -> str:
    return "without limit" if value < 0 else str(value)


def _cpu_quota() -> float | None:
    """The CPU quota of the container in cores; None if unlimited."""
    words = _words(_QUOTA)
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _tasks_of_container() -> int | None:
    words: Iterable[str] = _words(_TASKS)
    return next((int(word) for word in words if word.isdigit()), None)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
