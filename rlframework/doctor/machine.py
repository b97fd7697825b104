"""Checks of this machine: Python, processor, memory, disk, limits, network, environment variables."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlframework.doctor.checks import Context, Finding, check, note, ok, unknown, warning
from rlframework.observers import host
from rlframework.observers.secrets import HIDDEN, is_secret_name
from rlframework.workers.machine import cpu_count

GIB = 2**30
LITTLE_MEMORY, LITTLE_DISK, LITTLE_SHM = 2 * GIB, 5 * GIB, GIB
FULL_DISK = 0.95
"""Fraction of disk usage above which Ray no longer spills objects to it."""
FEW_FILES, FEW_TASKS = 4096, 2048

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
    version, system = platform.python_version(), platform.system()
    text = f"Python {version} at {sys.executable}; {system} {platform.release()} {platform.machine()}"
    yield ok(text, facts={"version": version, "executable": sys.executable})
    if system != "Linux":
        remedy = "Use Linux, or worker_group.name=inline; GPUs and Ray clusters need Linux"
        yield warning(f"rlframework is not tested on {system}", remedy)


@check("machine", "processor")
def processor(context: Context) -> Iterator[Finding]:
    """Available cores, and the CPU quota of a container."""
    cores, words = cpu_count(), _words(_QUOTA)
    quota = int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None
    text = f"{host.cpu_name()}, {cores} core(s) for this process of {os.cpu_count()}"
    yield ok(text, facts={"cores": cores, "quota": quota})
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
        remedy = "Stop other programs, or use a machine with more memory: torch alone takes 0.5 GiB per worker"
        yield warning(text, remedy)
    else:
        yield ok(text, facts={"total_bytes": total, "free_bytes": free})


@check("machine", "disk")
def disk(context: Context) -> Iterator[Finding]:
    """Free space in the output directory, and where Ray and others put temporary files."""
    places = {"working directory": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    if context.config is not None:
        places["output_dir"] = context.config.output_dir.absolute()
    for name, path in places.items():
        usage = shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists()))
        text, facts = f"{name} ({path}): {gib(usage.free)} free", {"free_bytes": usage.free}
        if usage.free < LITTLE_DISK or 1 - usage.free / usage.total > FULL_DISK:
            remedy = "Free some space"
            if name == "temporary files":
                remedy += ", or set TMPDIR and RAY_TMPDIR to another disk; Ray stops writing to a disk that is 95% full"
            yield warning(text, remedy, facts)
        else:
            yield ok(text, facts=facts)


@check("machine", "shared memory")
def shared_memory(context: Context) -> Iterator[Finding]:
    """Size of /dev/shm, where Ray keeps objects that several workers share."""
    if not SHM.is_dir():
        yield note(f"{SHM} does not exist: Ray keeps its objects in files instead")
        return
    usage = shutil.disk_usage(SHM)
    text, facts = (
        f"{SHM}: {gib(usage.total)}, {gib(usage.free)} free",
        {"total_bytes": usage.total, "free_bytes": usage.free},
    )
    if usage.free >= LITTLE_SHM:
        yield ok(text, facts=facts)
    elif context.config is not None and not context.uses_group("ray"):
        yield note(f"{text}; too little for Ray, but this run does not use it", facts=facts)
    else:
        remedy = f"docker run --shm-size=8g in a container, else mount -o remount,size=8G {SHM}, or delete files in it"
        yield warning(f"{text}: Ray falls back to slow files, and NCCL may fail", remedy, facts)


@check("machine", "open files")
def open_files(context: Context) -> Iterator[Finding]:
    """The limit on open files: each Ray worker opens dozens of files and sockets, some in Ray's own processes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    facts = {"soft": soft, "hard": hard}
    if 0 <= hard < FEW_FILES:
        remedy = (
            "Raise the hard limit to 65536 (limits.conf, LimitNOFILE= of systemd, docker run --ulimit nofile=65536)"
        )
        yield warning(f"at most {hard} open files per process (ulimit -n)", remedy, facts)
    elif 0 <= soft < FEW_FILES:
        text = f"{soft} open files per process (ulimit -n), up to {_limit(hard)} on request, which a local Ray makes"
        yield note(text, "Before `ray start`, run: ulimit -n 65536", facts)
    else:
        yield ok(f"{_limit(soft)} open files per process (ulimit -n)", facts=facts)


@check("machine", "processes")
def processes(context: Context) -> Iterator[Finding]:
    """The limit on processes and threads, also of a container; Ray starts hundreds of threads."""
    soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits = [soft] if soft >= 0 else []
    limits += [int(word) for word in _words(_TASKS) if word.isdigit()]
    least = min(limits, default=None)
    if least is not None and least < FEW_TASKS:
        text = f"at most {least} processes and threads (ulimit -u, pids.max of the container)"
        remedy = f"Raise the limit to at least {FEW_TASKS} (ulimit -u, docker run --pids-limit)"
        yield warning(text, remedy, {"limit": least})
    else:
        text = "no limit on processes and threads" if least is None else f"up to {least} processes and threads"
        yield ok(text, facts={"limit": least})


@check("machine", "network")
def network(context: Context) -> Iterator[Finding]:
    """The loopback interface, on which the services of a run listen, and this machine's hostname."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as listening:
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
    given = ", ".join(name for name in _PROXIES if os.environ.get(name))
    spared = {word.strip() for name in ("no_proxy", "NO_PROXY") for word in os.environ.get(name, "").split(",")}
    if given and spared & {"127.0.0.1", "*", "127.0.0.0/8"}:
        yield ok(f"{given}: set, but not used for this machine's own addresses")
    elif given:
        yield warning(
            f"{given}: set, but no_proxy lacks 127.0.0.1, so Ray's connections may go to the proxy",
            "Set no_proxy=127.0.0.1,localhost, plus the addresses of the nodes on a cluster",
        )


@check("machine", "variables")
def variables(context: Context) -> Iterator[Finding]:
    """Relevant environment variables; for secrets, only that they are set."""
    names = sorted(name for name in os.environ if name.startswith(_SHOWN_BEGINNINGS) or name in _SHOWN)
    shown = {name: HIDDEN if is_secret_name(name) else os.environ[name] for name in names}
    if shown:
        yield ok(", ".join(f"{name}={value}" for name, value in shown.items()), facts={"variables": shown})
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        yield note("CUDA_VISIBLE_DEVICES is empty: GPUs are hidden", "Unset it to use GPUs")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if threads and not threads.isdigit():
        yield warning(f"OMP_NUM_THREADS={threads!r} is not a number and is ignored", "Set it to a number, or unset it")


def _limit(value: int) -> str:
    return "without limit" if value < 0 else str(value)


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []
