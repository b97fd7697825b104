"""Megatron-core where there is no GPU: within `on(device)` what it asks of CUDA is done by the CPU.

Megatron-core names the device "cuda" in many places. On a CPU a mode turns that into "cpu" and a few functions of
`torch.cuda` stand for the CPU's. On a GPU `on` does nothing at all. This is for development and for tests.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlframework_megatron.upstream import random_states

CPU = torch.device("cpu")
_inside = threading.local()


class _CudaIsCpu(TorchFunctionMode):
    """What is asked to be on "cuda" is on the CPU; `Tensor.type()` names CUDA's types, which megatron-core compares."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = dict(kwargs or {})
        if func is Tensor.cuda:
            return args[0]
        if func is Tensor.type and len(args) == 1 and not given:
            return func(*args).replace("torch.", "torch.cuda.")
        if "device" in given and _is_cuda(given["device"]):
            given["device"] = CPU
        if func is Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **given)


def _is_cuda(device: Any) -> bool:
    return str(device).startswith("cuda") if isinstance(device, (str, torch.device)) else False


class _Stream:
    """Stands for a stream of CUDA: the CPU does one thing after the other."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> _Stream:
        """An event that has happened: all that is asked of one is `synchronize`."""
        return self


def _get_state(*arguments: Any, **more: Any) -> Tensor:
    return torch.get_rng_state()


def _set_state(state: Tensor, *arguments: Any, **more: Any) -> None:
    torch.set_rng_state(state)


def _nothing(*arguments: Any, **more: Any) -> None:
    pass


_all_to_all = dist.all_to_all_single


def _with_numbers(*arguments: Any, **more: Any) -> Any:
    """`all_to_all_single` with sizes as plain numbers: megatron-core has them as tensors, and gloo takes none."""
    sizes = ("output_split_sizes", "input_split_sizes")
    more |= {name: more[name].tolist() for name in sizes if isinstance(more.get(name), Tensor)}
    return _all_to_all(*arguments, **more)


STAND_INS: Mapping[str, Any] = {
    "current_device": lambda: CPU,
    "synchronize": _nothing,
    "Stream": _Stream,
    "stream": lambda stream: nullcontext(),
    "current_stream": _Stream,
    "default_stream": _Stream,
    "get_rng_state": _get_state,
    "set_rng_state": _set_state,
    "manual_seed": torch.manual_seed,
}
"""Of `torch.cuda`."""


@contextmanager
def _adapted() -> Iterator[None]:
    if getattr(_inside, "depth", 0):  # already
        yield
        return
    _inside.depth = 1
    own: dict[str, Any] = {"_get_cuda_rng_state": _get_state, "_set_cuda_rng_state": _set_state}
    try:
        with (
            patch.multiple(torch.cuda, **STAND_INS),
            patch.multiple(random_states, **own),
            patch.object(dist, "all_to_all_single", _with_numbers),
            _CudaIsCpu(),
        ):
            yield
    finally:
        _inside.depth = 0


def on(device: torch.device) -> AbstractContextManager[None]:
    """Around every use of megatron-core: on a GPU nothing, elsewhere the adapter."""
    return nullcontext() if device.type == "cuda" else _adapted()
