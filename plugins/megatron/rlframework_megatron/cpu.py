"""Run megatron-core without a GPU: inside `on(device)`, its CUDA calls run on the CPU.

Megatron-core hard-codes the device "cuda" in many places. On a CPU, a function mode replaces it with "cpu" and a few
functions are replaced with CPU equivalents. On a GPU, `on` does nothing. For development and tests.

Replaced attributes, because megatron-core has no option for them:

    torch.cuda                       streams, seeds and the current device (`STAND_INS`): there is no CUDA
    random_states                    megatron-core's own functions for CUDA's random state
    torch.distributed                `all_to_all_single`: gloo does not accept sizes in tensors
    torch.compile (in `upstream`)    during the import: there is no compiler to load
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from rlframework.models.replacing import replacing
from rlframework_megatron.upstream import random_states

CPU = torch.device("cpu")
_inside = threading.local()


class _CudaIsCpu(TorchFunctionMode):
    """Redirect "cuda" to the CPU; `Tensor.type()` returns CUDA type names, which megatron-core compares."""

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
    """A stand-in for a CUDA stream: the CPU executes in order."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def record_event(self, event: Any = None) -> _Stream:
        """Return an already completed event; only its `synchronize` is used."""
        return self


def _get_state(*arguments: Any, **more: Any) -> Tensor:
    return torch.get_rng_state()


def _set_state(state: Tensor, *arguments: Any, **more: Any) -> None:
    torch.set_rng_state(state)


def _no_op(*arguments: Any, **more: Any) -> None:
    pass


_all_to_all = dist.all_to_all_single


def _with_int_sizes(*arguments: Any, **more: Any) -> Any:
    """Call `all_to_all_single` with integer sizes: megatron-core passes tensors, which gloo does not accept."""
    sizes = ("output_split_sizes", "input_split_sizes")
    more |= {name: more[name].tolist() for name in sizes if isinstance(more.get(name), Tensor)}
    return _all_to_all(*arguments, **more)


STAND_INS: Mapping[str, Any] = {
    "current_device": lambda: CPU,
    "synchronize": _no_op,
    "Stream": _Stream,
    "stream": lambda stream: nullcontext(),
    "current_stream": _Stream,
    "default_stream": _Stream,
    "get_rng_state": _get_state,
    "set_rng_state": _set_state,
    "manual_seed": torch.manual_seed,
}
"""Replacements for functions of `torch.cuda`."""


@contextmanager
def _emulated_cuda() -> Iterator[None]:
    if getattr(_inside, "depth", 0):  # already active
        yield
        return
    _inside.depth = 1
    try:
        with (
            replacing(torch.cuda, **STAND_INS),
            replacing(random_states, _get_cuda_rng_state=_get_state, _set_cuda_rng_state=_set_state),
            replacing(dist, all_to_all_single=_with_int_sizes),
            _CudaIsCpu(),
        ):
            yield
    finally:
        _inside.depth = 0


def on(device: torch.device) -> AbstractContextManager[None]:
    """Return the context for using megatron-core on `device`: a no-op on a GPU, the CPU adapter otherwise."""
    return nullcontext() if device.type == "cuda" else _emulated_cuda()
