"""Tests what might crash or hang a process, in a process of its own: `python probes.py NAME`.

The last line of the output is JSON: the result of the function NAME, or `{"error": text}` if it raises. This program
does not import rlframework.
"""

from __future__ import annotations

import json
import logging
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypedDict


class TorchGpu(TypedDict):
    """A GPU as torch sees it. `error`: why it cannot compute; None if it can."""

    name: str
    capability: tuple[int, int]
    error: str | None


class TorchDevices(TypedDict):
    """The devices and libraries that torch can use: versions, and None for what is missing or works (`gloo_error`)."""

    torch: str
    cuda: str | None
    cuda_available: bool
    gpus: list[TorchGpu]
    nccl: str | None
    gloo_error: str | None
    warnings: list[str]


class RayNode(TypedDict):
    """A node of a Ray cluster, with its total resources."""

    address: str
    alive: bool
    cpus: float
    gpus: float
    memory_bytes: float
    object_store_bytes: float


class RayCluster(TypedDict):
    """A Ray cluster: the versions that Ray compares on attaching, its nodes, and the resources that are free."""

    ray: str
    python: str
    nodes: list[RayNode]
    free: dict[str, float]


def torch_devices() -> TorchDevices:
    """Import torch, and test CUDA, a kernel on each GPU, NCCL and gloo."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch
        import torch.distributed as dist

        cuda = torch.cuda.is_available()
        nccl = dist.is_available() and dist.is_nccl_available() and torch.version.cuda is not None
        gloo = dist.is_available() and dist.is_gloo_available()
        return {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cuda_available": cuda,
            "gpus": [
                {
                    "name": torch.cuda.get_device_name(index),
                    "capability": torch.cuda.get_device_capability(index),
                    "error": _error_of(partial(_compute, index)),
                }
                for index in range(torch.cuda.device_count() if cuda else 0)
            ],
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if nccl else None,
            "gloo_error": _error_of(_form_gloo_group) if gloo else "torch was built without it",
            "warnings": [str(warning.message).partition("\n")[0] for warning in caught],
        }


def ray_cluster(address: str) -> RayCluster:
    """Attach to the Ray cluster at `address`, as a run does."""
    import ray

    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        found = [(node, node.get("Resources", {})) for node in ray.nodes()]  # type: ignore[no-untyped-call]
        free = ray.available_resources()  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()
    return {
        "ray": ray.__version__,
        "python": ".".join(map(str, sys.version_info[:3])),
        "nodes": [
            {
                "address": str(node.get("NodeManagerAddress")),
                "alive": bool(node.get("Alive")),
                "cpus": total.get("CPU", 0),
                "gpus": total.get("GPU", 0),
                "memory_bytes": total.get("memory", 0),
                "object_store_bytes": total.get("object_store_memory", 0),
            }
            for node, total in found
        ],
        "free": {name: amount for name, amount in free.items() if not name.startswith("node:")},
    }


def _compute(index: int) -> None:
    import torch

    torch.ones(2, device=f"cuda:{index}").sum().item()


def _form_gloo_group() -> None:
    """Form a group of one, which binds the address that gloo would announce to other ranks."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def _error_of(work: Callable[[], object]) -> str | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the error is the result
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


def _with_causes(error: BaseException) -> str:
    """The messages of `error` and its causes; of an embedded traceback, only the last line."""
    before, traceback, inside = str(error).strip().partition("Traceback (most recent call last):")
    text = f"{type(error).__name__}: {before}{inside.splitlines()[-1] if traceback and inside else ''}"
    return text if error.__cause__ is None else f"{text}; because of {_with_causes(error.__cause__)}"


if __name__ == "__main__":
    probes: dict[str, Callable[..., Mapping[str, Any]]] = {"torch_devices": torch_devices, "ray_cluster": ray_cluster}
    try:
        result = probes[sys.argv[1]](*sys.argv[2:])
    except Exception as error:  # noqa: BLE001 - the error is the result
        result = {"error": _with_causes(error)}
    print(json.dumps(result))
