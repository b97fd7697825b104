"""Checks of this machine: hardware, limits, environment variables, GPUs, packages and plugins."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from rlframework.base.errors import PluginError
from rlframework.base.secrets import HIDDEN, is_secret_name
from rlframework.generation.engine_environment import ProbeError
from rlframework.observers import host
from rlframework.observers.host import package_version
from rlframework.observers.run_environment import PACKAGES
from rlframework.plugins.hookspec import DoctorFinding
from rlframework.plugins.types import GenerationEngineRecord
from rlframework.workers.machine import cpu_count
from rlframework_tools.doctor.checks import Context, judged, note, ok, unknown, warning
from rlframework_tools.doctor.probes import TorchDevices

GIB = 2**30
LITTLE_MEMORY, LITTLE_DISK, LITTLE_SHM = 2 * GIB, 5 * GIB, GIB
FULL_DISK = 0.95
"""Fraction of disk usage above which Ray no longer spills objects to it."""
FEW_FILES, FEW_TASKS = 4096, 2048

SHM, _QUOTA, _TASKS = Path("/dev/shm"), Path("/sys/fs/cgroup/cpu.max"), Path("/sys/fs/cgroup/pids.max")
_SHOWN_BEGINNINGS = ("RAY_", "NCCL_", "GLOO_", "HF_", "RLFRAMEWORK_", "PYTORCH_", "TORCH_", "WANDB_", "MLFLOW_", "OMP_")
_SHOWN = ("CUDA_VISIBLE_DEVICES", "TRANSFORMERS_OFFLINE", "MASTER_ADDR", "MASTER_PORT", "LD_LIBRARY_PATH", "PYTHONPATH")
_PROXIES = ("http_proxy", "https_proxy", "grpc_proxy", "HTTP_PROXY", "HTTPS_PROXY", "GRPC_PROXY")


LEAST_CAPABILITY = (8, 0)
"""Minimum compute capability for bfloat16 in hardware."""

CORE = "rlframework-core"
OWN = (CORE, "rlframework-dtensor", "rlframework-deepspeed", "rlframework-megatron", "rlframework-vllm")
UNRELATED = "rlframework"
"""An unrelated distribution on PyPI that has a package of the same name."""
_MISSING = "not installed"


def gib(size: float) -> str:
    """Format bytes in GiB."""
    return f"{size / GIB:,.1f} GiB"


def python(context: Context) -> Iterator[DoctorFinding]:
    """The Python version and its location."""
    version, system = platform.python_version(), platform.system()
    text = f"Python {version} at {sys.executable}; {system} {platform.release()} {platform.machine()}"
    yield ok(text, facts={"version": version, "executable": sys.executable})
    if system != "Linux":
        yield warning(
            f"rlframework is not tested on {system}",
            "Use Linux, or worker_group.name=inline; GPUs and Ray clusters need Linux",
        )


def processor(context: Context) -> Iterator[DoctorFinding]:
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
    load = os.getloadavg()[0]
    if load > cores / 2 and "OMP_NUM_THREADS" not in os.environ:
        yield note(
            f"other programs keep {load:.1f} of {cores} core(s) busy: torch's threads will wait for each other",
            "Set OMP_NUM_THREADS=1 to train a small model on the CPU: it can be ten times faster then",
        )


def memory(context: Context) -> Iterator[DoctorFinding]:
    """RAM, within the limit of a container."""
    total, free = host.total_memory(), host.available_memory()
    if total is None or free is None:
        yield unknown("cannot determine the amount of memory")
    else:
        remedy = "Stop other programs, or use a machine with more memory: torch alone takes 0.5 GiB per worker"
        facts = {"total_bytes": total, "free_bytes": free}
        yield judged(free >= LITTLE_MEMORY, f"{gib(total)}, {gib(free)} free", remedy, facts)


def disk(context: Context) -> Iterator[DoctorFinding]:
    """Free space in the output directory, and where Ray and others put temporary files."""
    places = {"working directory": Path.cwd(), "temporary files": Path(tempfile.gettempdir())}
    if context.config is not None:
        places["output_dir"] = context.config.output_dir.absolute()
    for name, path in places.items():
        usage = shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists()))
        remedy = "Free some space"
        if name == "temporary files":
            remedy += ", or set TMPDIR and RAY_TMPDIR to another disk; Ray stops writing to a disk that is 95% full"
        enough = usage.free >= LITTLE_DISK and 1 - usage.free / usage.total <= FULL_DISK
        yield judged(enough, f"{name} ({path}): {gib(usage.free)} free", remedy, {"free_bytes": usage.free})


def shared_memory(context: Context) -> Iterator[DoctorFinding]:
    """Size of /dev/shm, where Ray keeps objects that several workers share."""
    if not SHM.is_dir():
        yield note(f"{SHM} does not exist: Ray keeps its objects in files instead")
        return
    usage = shutil.disk_usage(SHM)
    text, facts = f"{SHM}: {gib(usage.total)}, {gib(usage.free)} free", {"free_bytes": usage.free}
    remedy = f"docker run --shm-size=8g in a container, else mount -o remount,size=8G {SHM}, or delete files in it"
    if usage.free >= LITTLE_SHM:
        yield ok(text, facts=facts)
    elif context.config is not None and not context.uses_group("ray"):
        yield note(f"{text}; too little for Ray, but this run does not use it", facts=facts)
    else:
        yield warning(f"{text}: Ray falls back to slow files, and NCCL may fail", remedy, facts)


def open_files(context: Context) -> Iterator[DoctorFinding]:
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


def processes(context: Context) -> Iterator[DoctorFinding]:
    """The limit on processes and threads, also of a container; Ray starts hundreds of threads."""
    limits = [limit for limit in resource.getrlimit(resource.RLIMIT_NPROC)[:1] if limit >= 0]
    least = min([*limits, *(int(word) for word in _words(_TASKS) if word.isdigit())], default=None)
    text = f"{'no limit on' if least is None else f'at most {least}'} processes and threads (ulimit -u, pids.max)"
    remedy = f"Raise the limit to at least {FEW_TASKS} (ulimit -u, docker run --pids-limit)"
    yield judged(least is None or least >= FEW_TASKS, text, remedy)


def proxies(context: Context) -> Iterator[DoctorFinding]:
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


def variables(context: Context) -> Iterator[DoctorFinding]:
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


def gpus(context: Context) -> Iterator[DoctorFinding]:
    """The GPUs that nvidia-smi lists."""
    found = host.gpus()
    driver = host.command_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"])
    if not found:
        text = "nvidia-smi finds no GPU" if driver is not None else "no GPU: nvidia-smi is missing or fails"
        if context.device == "cuda":
            remedy = "Set device=cpu, or run where nvidia-smi shows a GPU (in a container: docker run --gpus all)"
            yield context.problem(f"{text}, but device=cuda", remedy, needed=not context.uses_group("ray"))
        else:
            yield note(text, "A GPU is optional: everything also runs on CPUs")
    version = (driver or "").strip().partition("\n")[0]
    for number, gpu in enumerate(found):
        text = f"GPU {number}: {gpu.name}, {gib(gpu.memory_bytes)}, {gib(gpu.free_bytes)} free; driver {version}"
        free = gpu.free_bytes >= gpu.memory_bytes // 2
        text += "" if free else ": in use by other processes"
        yield judged(free, text, "nvidia-smi lists the processes; use another GPU", asdict(gpu) | {"driver": version})


def torch(context: Context) -> Iterator[DoctorFinding]:
    """Whether torch can be imported, detects all GPUs, can compute on them, and can connect workers."""
    try:
        found: TorchDevices = context.probe("torch_devices")
    except ProbeError as error:
        remedy = "Reinstall torch: pip install --force-reinstall torch"
        yield context.problem(f"torch cannot be imported: {error}", remedy, needed=True)
        return
    facts = {"torch": found["torch"], "cuda": found["cuda"], "nccl": found["nccl"]}
    built = f"for CUDA {found['cuda']}, with NCCL {found['nccl']}" if found["cuda"] else "without CUDA"
    yield ok(f"torch {found['torch']}, built {built}", facts=facts)
    on_gpu = context.device == "cuda"
    if host.gpus() and not found["cuda_available"]:
        if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
            yield note("torch sees no GPU because CUDA_VISIBLE_DEVICES is empty", "Unset it to use GPUs")
        elif found["cuda"]:
            text = f"torch for CUDA {found['cuda']} cannot use the GPU: {'; '.join(found['warnings'])}"
            remedy = "Update the driver, or install torch for an older CUDA; nvidia-smi shows the newest supported one"
            yield context.problem(text, remedy, needed=on_gpu)
        else:
            remedy = "Install torch's CUDA wheel: see https://pytorch.org/get-started"
            yield context.problem("there is a GPU, but this torch is built without CUDA", remedy, needed=on_gpu)
    for number, gpu in enumerate(found["gpus"]):
        if gpu["error"]:
            text = f"torch cannot compute on GPU {number} ({gpu['name']}): {gpu['error']}"
            remedy = "Check nvidia-smi, or exclude the GPU with CUDA_VISIBLE_DEVICES"
            yield context.problem(text, remedy, needed=on_gpu)
        elif tuple(gpu["capability"]) < LEAST_CAPABILITY:
            text = f"GPU {number} ({gpu['name']}) has compute capability {'.'.join(map(str, gpu['capability']))}"
            yield warning(f"{text}: no bfloat16 in hardware", "Set policy.precision=float32")
    if found["cuda"] and not found["nccl"]:
        text = "torch is built for CUDA but without NCCL: several GPUs cannot communicate"
        yield context.problem(text, "Install the official torch wheels for Linux", needed=on_gpu)
    if found["gloo_error"] is not None:
        named = os.environ.get("GLOO_SOCKET_IFNAME")
        remedy = (
            f"Set GLOO_SOCKET_IFNAME to an interface listed by `ip addr` (it is {named!r})"
            if named
            else "Give this machine's hostname an address (/etc/hosts), or set GLOO_SOCKET_IFNAME=lo"
        )
        several = any(policy_run.worker_group.num_workers > 1 for policy_run in context.policy_runs)
        yield context.problem(f"gloo cannot form a process group: {found['gloo_error']}", remedy, needed=several)


def versions(context: Context) -> Iterator[DoctorFinding]:
    """The versions of relevant packages."""
    found = {name: package_version(name) for name in dict.fromkeys([*OWN, *PACKAGES])}
    there = {name: version for name, version in found.items() if version != _MISSING}
    yield ok(", ".join(f"{name} {version}" for name, version in there.items()), facts={"versions": there})


def requirements(context: Context) -> Iterator[DoctorFinding]:
    """Requirements of rlframework's distributions, and transitively of their dependencies."""
    own = [name for name in OWN if package_version(name) != _MISSING]
    backends = [f"rlframework-{policy_run.policy.backend}" for policy_run in context.policy_runs]
    found = list(clashes(own))
    for distribution, needed, there in found:
        installed = "it is not installed" if there == _MISSING else f"{there} is installed"
        text = f"{distribution} requires {needed}, but {installed}"
        if distribution in OWN:
            yield context.problem(text, f"pip install '{needed}'", needed=distribution in (CORE, *backends))
        else:
            yield warning(text, f"Install a version that fits {needed}; `pip check` shows which packages require it")
    if not found:
        yield ok(f"all requirements of {', '.join(own)} are met")
    if (version := package_version(UNRELATED)) != _MISSING:
        text = f"the unrelated distribution {UNRELATED!r} {version} is installed and overwrites this package"
        yield context.problem(text, f"pip uninstall {UNRELATED}, then reinstall rlframework-core", needed=True)


def clashes(roots: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """Yield unmet requirements of `roots` and, transitively, of their dependencies, breadth first.

    Each is the distribution, its requirement as for `pip install`, and the installed version or "not installed".
    """
    waiting = [(root, "") for root in roots]
    for distribution, extra in waiting:  # grows meanwhile
        for requirement in map(Requirement, metadata.requires(distribution) or []):
            if _applies(requirement, "") == bool(extra) or not _applies(requirement, extra):
                continue  # of another machine or extra, or seen without the extra
            there = package_version(requirement.name)
            if there == _MISSING or not requirement.specifier.contains(there, prereleases=True):
                requirement.marker = None
                yield distribution, str(requirement), there
                continue
            found = str(canonicalize_name(requirement.name))
            further = [(found, inner) for inner in ("", *sorted(requirement.extras))]
            waiting += [one for one in further if one not in waiting]


def _applies(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def compilers(context: Context) -> Iterator[DoctorFinding]:
    """Compilers for DeepSpeed's offload to disk, which is built on first use."""
    if package_version("deepspeed") == _MISSING:
        return
    if missing := " and ".join(tool for tool in ("g++", "ninja") if shutil.which(tool) is None):
        text = f"{missing} not found: DeepSpeed cannot offload to disk (device: nvme); everything else works"
        yield note(text, "To enable it: apt-get install g++; pip install ninja, with its folder on PATH")
    else:
        yield ok("g++ and ninja are installed")


def plugins(context: Context) -> Iterator[DoctorFinding]:
    """The available plugins by kind, and those that are broken or disabled."""
    try:
        rows = context.manager.listing()
    except PluginError as error:
        yield context.problem(str(error), "See `rlframework plugins`", needed=True)
        return
    kinds: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row.status == "active" and row.kind is not None:
            kinds[row.kind].append(row.name)
    text = "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in sorted(kinds.items()))
    yield ok(text, facts={"parts": dict(kinds)})
    for row in rows:
        title = f"the {row.kind or 'plugin'} {row.name} ({row.distribution} {row.version}) is {row.status}"
        if row.status == "disabled":
            yield note(f"{title}: {row.reason}")
        elif row.status == "broken":
            remedy = f"Reinstall {row.distribution}, or disable it: RLFRAMEWORK_DISABLE_PLUGINS={row.name}"
            needed = context.config is None  # a chosen one would not load
            yield context.problem(f"{title}: {row.reason}", remedy, needed=needed)


def generation_engines(context: Context) -> Iterator[DoctorFinding]:
    """The generation engines with their capabilities; of a run, the one that it selects."""
    with suppress(PluginError):  # which `plugins` reports
        for row in context.manager.listing():
            chosen = context.config is None or context.config.generation.name == row.name
            if row.kind == GenerationEngineRecord.kind and row.status == "active" and chosen:
                can = ", ".join(row.capabilities) or "no capabilities"
                facts = {"name": row.name, "capabilities": list(row.capabilities)}
                yield ok(f"{row.name} ({row.distribution} {row.version}): {can}", facts=facts)
