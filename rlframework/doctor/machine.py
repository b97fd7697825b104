"""Checks of this machine: Python, processor, memory, disk, limits, proxies, environment variables."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from rlframework.doctor.checks import Check, Context, Finding, note, ok, unknown, warning
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


def python(context: Context) -> Iterator[Finding]:
    """The Python version and its location."""
    version, system = platform.python_version(), platform.system()
    text = f"Python {version} at {sys.executable}; {system} {platform.release()} {platform.machine()}"
    yield ok(text, facts={"version": version, "executable": sys.executable})
    if system != "Linux":
        remedy = "Use Linux, or worker_group.name=inline; GPUs and Ray clusters need Linux"
        yield warning(f"rlframework is not tested on {system}", remedy)


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


def memory(context: Context) -> Iterator[Finding]:
    """RAM, within the limit of a container."""
    total, free = host.total_memory(), host.available_memory()
    if total is None or free is None:
        yield unknown("cannot determine the amount of memory")
    elif free < LITTLE_MEMORY:
        remedy = "Stop other programs, or use a machine with more memory: torch alone takes 0.5 GiB per worker"
        yield warning(f"{gib(total)}, {gib(free)} free", remedy)
    else:
        yield ok(f"{gib(total)}, {gib(free)} free", facts={"total_bytes": total, "free_bytes": free})


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


def shared_memory(context: Context) -> Iterator[Finding]:
    """Size of /dev/shm, where Ray keeps objects that several workers share."""
    if not SHM.is_dir():
        yield note(f"{SHM} does not exist: Ray keeps its objects in files instead")
        return
    usage = shutil.disk_usage(SHM)
    text, facts = f"{SHM}: {gib(usage.total)}, {gib(usage.free)} free", {"free_bytes": usage.free}
    if usage.free >= LITTLE_SHM:
        yield ok(text, facts=facts)
    elif context.config is not None and not context.uses_group("ray"):
        yield note(f"{text}; too little for Ray, but this run does not use it", facts=facts)
    else:
        remedy = f"docker run --shm-size=8g in a container, else mount -o remount,size=8G {SHM}, or delete files in it"
        yield warning(f"{text}: Ray falls back to slow files, and NCCL may fail", remedy, facts)


def open_files(context: Context) -> Iterator[Finding]:
    """The limit on open files: each Ray worker opens dozens of files and sockets, some in Ray's own processes."""
    soft, hard = (float("inf") if limit < 0 else limit for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    text = f"{'any number of' if soft > sys.maxsize else soft} open files per process (ulimit -n)"
    if hard < FEW_FILES:
        remedy = "Raise the hard limit to 65536 (limits.conf, LimitNOFILE= of systemd, docker --ulimit nofile=65536)"
        yield warning(f"at most {text}", remedy)
    elif soft < FEW_FILES:
        yield note(f"{text}; a local Ray raises it by itself", "Before `ray start`, run: ulimit -n 65536")
    else:
        yield ok(text)


def processes(context: Context) -> Iterator[Finding]:
    """The limit on processes and threads, also of a container; Ray starts hundreds of threads."""
    limits = [limit for limit in resource.getrlimit(resource.RLIMIT_NPROC)[:1] if limit >= 0]
    least = min([*limits, *(int(word) for word in _words(_TASKS) if word.isdigit())], default=None)
    text = f"{'no limit on' if least is None else f'at most {least}'} processes and threads (ulimit -u, pids.max)"
    if least is not None and least < FEW_TASKS:
        yield warning(text, f"Raise the limit to at least {FEW_TASKS} (ulimit -u, docker run --pids-limit)")
    else:
        yield ok(text)


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


def variables(context: Context) -> Iterator[Finding]:
    """Relevant environment variables; for secrets, only that they are set."""
    names = sorted(name for name in os.environ if name.startswith(_SHOWN_BEGINNINGS) or name in _SHOWN)
    shown = {name: HIDDEN if is_secret_name(name) else os.environ[name] for name in names}
    if shown:
        yield ok(", ".join(f"{name}={value}" for name, value in shown.items()), facts={"variables": shown})


def _words(path: Path) -> list[str]:
    try:
        return path.read_text().split()
    except OSError:
        return []


CHECKS = (
    Check("machine", "python", python),
    Check("machine", "processor", processor),
    Check("machine", "memory", memory),
    Check("machine", "disk", disk),
    Check("machine", "shared memory", shared_memory),
    Check("machine", "open files", open_files),
    Check("machine", "processes", processes),
    Check("machine", "proxies", proxies),
    Check("machine", "variables", variables),
)
