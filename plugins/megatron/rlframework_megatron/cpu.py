"""Run megatron-core without a GPU: inside `on(device)`, its CUDA calls run on the CPU.

Megatron-core hard-codes the device "cuda" in many places. On a CPU, a function mode replaces it with "cpu" and a few
functions are replaced with CPU equivalents. On a GPU, `on` does nothing. For development and tests.

Replaced attributes, because megatron-core has no option for them:

    torch.cuda                       streams, seeds and the current device (`STAND_INS`): there is no CUDA
    random_states                    megatron-core's own functions for CUDA's random state
    torch.distributed                gloo does not accept sizes in tensors (`all_to_all_single`), or parts of different
                                     sizes (`all_gather`, `reduce_scatter`)
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

from rlframework.engine import replacing
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


_all_gather = dist.all_gather


def _all_gather_uneven(outputs: list[Tensor], tensor: Tensor, group: Any = None, **more: Any) -> Any:
    """Call `all_gather` with parts of one size: the tokens of experts on tensor ranks differ in number."""
    rows = [output.shape[0] if output.dim() else 1 for output in outputs]
    if len(set(rows)) == 1:
        return _all_gather(outputs, tensor, group, **more)
    padded = [output.new_empty(max(rows), *output.shape[1:]) for output in outputs]
    own = torch.cat((tensor, tensor.new_zeros(max(rows) - tensor.shape[0], *tensor.shape[1:])))
    _all_gather(padded, own, group)
    for output, found in zip(outputs, padded, strict=True):
        output.copy_(found[: output.shape[0]])
    return None


_reduce_scatter = dist.reduce_scatter


def _reduce_scatter_uneven(output: Tensor, inputs: list[Tensor], op: Any = None, group: Any = None, **more: Any) -> Any:
    """Call `reduce_scatter` as a sum over all parts if they differ in size; see `_all_gather_uneven`."""
    op = dist.ReduceOp.SUM if op is None else op
    if len({one.shape for one in inputs}) == 1:
        return _reduce_scatter(output, inputs, op, group, **more)
    total = torch.cat(inputs)
    dist.all_reduce(total, op, group)
    return output.copy_(total.split([one.shape[0] for one in inputs])[dist.get_rank(group)])


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
            replacing(
                dist,
                all_to_all_single=_with_int_sizes,
                all_gather=_all_gather_uneven,
                reduce_scatter=_reduce_scatter_uneven,
            ),
            _CudaIsCpu(),
        ):
            yield
    finally:
        _inside.depth = 0


def on(device: torch.device) -> AbstractContextManager[None]:
    """Return the context for using megatron-core on `device`: a no-op on a GPU, the CPU adapter otherwise."""
    return nullcontext() if device.type == "cuda" else _emulated_cuda()
