"""Checks of GPUs, their driver, and torch's support for them: CUDA, NCCL, gloo. Only a child process imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator

from rlframework.doctor.checks import Context, Finding, ProbeError, check, note, ok, warning
from rlframework.doctor.machine import gib
from rlframework.doctor.probes import TorchDevices, TorchGpu
from rlframework.observers import host

LEAST_CAPABILITY = (8, 0)
"""Minimum compute capability for bfloat16 in hardware."""


@check("devices", "GPUs")
def gpus(context: Context) -> Iterator[Finding]:
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
        text = f"GPU {number}: {gpu.name}, {gib(gpu.memory_bytes)}, {gib(gpu.free_bytes)} free"
        facts = {"memory_bytes": gpu.memory_bytes, "free_bytes": gpu.free_bytes, "driver": version}
        if gpu.free_bytes < gpu.memory_bytes // 2:
            remedy = "nvidia-smi lists the processes; use another GPU"
            yield warning(f"{text}: in use by other processes", remedy, facts)
        else:
            yield ok(f"{text}; driver {version}", facts=facts)


@check("devices", "torch")
def torch(context: Context) -> Iterator[Finding]:
    """Whether torch can be imported, detects all GPUs, and can compute on them."""
    try:
        found: TorchDevices = context.probe("torch_devices")
    except ProbeError as error:
        remedy = "Reinstall torch: pip install --force-reinstall torch"
        yield context.problem(f"torch cannot be imported: {error}", remedy, needed=True)
        return
    facts = {"torch": found["torch"], "cuda": found["cuda"], "cuda_available": found["cuda_available"]}
    cuda = f"built for CUDA {found['cuda']}" if found["cuda"] else "built without CUDA"
    yield ok(f"torch {found['torch']}, {cuda}", facts=facts)
    if host.gpus() and not found["cuda_available"]:
        yield _unseen_gpus(context, found)
    for number, gpu in enumerate(found["gpus"]):
        yield from _gpu(context, number, gpu)


@check("devices", "NCCL")
def nccl(context: Context) -> Iterator[Finding]:
    """NCCL, the communication library of GPU workers."""
    found = _probed(context)
    if found is None or not found["cuda"]:
        return
    if found["nccl"]:
        yield ok(f"NCCL {found['nccl']}, bundled with torch", facts={"nccl": found["nccl"]})
    else:
        text = "torch is built for CUDA but without NCCL: several GPUs cannot communicate"
        yield context.problem(text, "Install the official torch wheels for Linux", needed=context.device == "cuda")


@check("devices", "gloo")
def gloo(context: Context) -> Iterator[Finding]:
    """gloo, the communication library of CPU workers, tested by forming a group of one."""
    found = _probed(context)
    if found is None:
        return
    if found["gloo_error"] is None:
        yield ok("gloo can form a process group")
        return
    named = os.environ.get("GLOO_SOCKET_IFNAME")
    remedy = (
        f"Set GLOO_SOCKET_IFNAME to an interface listed by `ip addr` (it is {named!r})"
        if named
        else "Give this machine's hostname an address (/etc/hosts), or set GLOO_SOCKET_IFNAME=lo"
    )
    several = context.config is not None and context.config.worker_group.num_workers > 1
    yield context.problem(f"gloo cannot form a process group: {found['gloo_error']}", remedy, needed=several)


def _probed(context: Context) -> TorchDevices | None:
    """The result of the child process; None if it failed, which the check `torch` reports."""
    try:
        found: TorchDevices = context.probe("torch_devices")
    except ProbeError:
        return None
    return found


def _unseen_gpus(context: Context, found: TorchDevices) -> Finding:
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return note("torch sees no GPU because CUDA_VISIBLE_DEVICES is empty", "Unset it to use GPUs")
    if not found["cuda"]:
        text = "there is a GPU, but this torch is built without CUDA"
        remedy = "Install torch's CUDA wheel: see https://pytorch.org/get-started"
    else:
        said = f" ({'; '.join(found['warnings'])})" if found["warnings"] else ""
        text = f"torch for CUDA {found['cuda']} cannot use the GPU{said}"
        remedy = "Update the driver, or install torch for an older CUDA; nvidia-smi shows the newest supported version"
    return context.problem(text, remedy, needed=context.device == "cuda")


def _gpu(context: Context, number: int, gpu: TorchGpu) -> Iterator[Finding]:
    if gpu["error"]:
        text = f"torch cannot compute on GPU {number} ({gpu['name']}): {gpu['error']}"
        remedy = "Check nvidia-smi, or exclude the GPU with CUDA_VISIBLE_DEVICES"
        yield context.problem(text, remedy, needed=context.device == "cuda")
    elif tuple(gpu["capability"]) < LEAST_CAPABILITY:
        text = f"GPU {number} ({gpu['name']}) has compute capability {'.'.join(map(str, gpu['capability']))}"
        yield warning(f"{text}: no bfloat16 in hardware", "Set policy.precision=float32")
