"""Imports torch and tests CUDA, a kernel on each GPU, NCCL and gloo. Does not import rlframework."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from typing import Any


def main() -> None:
    """Print the results."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = look()
    found["warnings"] = [str(warning.message).partition("\n")[0] for warning in caught]
    print(json.dumps(found))


def look() -> dict[str, Any]:
    """Return the results. Values are None if not available; failures are texts under `..._error`."""
    import torch
    import torch.distributed as dist

    found: dict[str, Any] = {
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cuda_available": torch.cuda.is_available(),
        "gpus": [],
        "nccl": None,
        "gloo_error": "torch was built without it",
    }
    if found["cuda_available"]:
        found["gpus"] = [_gpu(torch, index) for index in range(torch.cuda.device_count())]
    if dist.is_available() and dist.is_nccl_available() and torch.version.cuda:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if dist.is_available() and dist.is_gloo_available():
        found["gloo_error"] = _error_of(lambda: _gloo(dist))
    return found


def _gpu(torch: Any, index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "memory_bytes": properties.total_memory,
        "capability": [properties.major, properties.minor],
        "error": _error_of(lambda: torch.ones(2, device=f"cuda:{index}").sum().item()),
    }


def _gloo(dist: Any) -> None:
    """Form a group of one, which binds the address that gloo would announce to other ranks."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


def _error_of(work: Callable[[], object]) -> str | None:
    try:
        work()
    except Exception as error:  # noqa: BLE001 - the error is the result
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    return None


if __name__ == "__main__":
    main()
