"""Checks of GPUs, their driver, and torch's support for them: CUDA, NCCL, gloo. Only a child process imports torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict

from rlframework.doctor.checks import Check, Context, Finding, ProbeError, note, ok, warning
from rlframework.doctor.machine import gib
from rlframework.doctor.probes import TorchDevices
from rlframework.observers import host

LEAST_CAPABILITY = (8, 0)
"""Minimum compute capability for bfloat16 in hardware."""


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
        text = f"GPU {number}: {gpu.name}, {gib(gpu.memory_bytes)}, {gib(gpu.free_bytes)} free; driver {version}"
        facts = asdict(gpu) | {"driver": version}
        if gpu.free_bytes < gpu.memory_bytes // 2:
            remedy = "nvidia-smi lists the processes; use another GPU"
            yield warning(f"{text}: in use by other processes", remedy, facts)
        else:
            yield ok(text, facts=facts)


def torch(context: Context) -> Iterator[Finding]:
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
        several = context.config is not None and context.config.worker_group.num_workers > 1
        yield context.problem(f"gloo cannot form a process group: {found['gloo_error']}", remedy, needed=several)


CHECKS = (Check("devices", "GPUs", gpus), Check("devices", "torch", torch))
