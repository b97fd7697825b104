"""What Megatron's optimizers hold of each local parameter: the fp32 values that they update, and AdamW's moments.

Three kinds are known. The plain fp32 optimizer updates the parameters themselves. The one for bfloat16 parameters
updates an fp32 copy of each. The distributed optimizer cuts the parameters' flat buffers over the data-parallel ranks:
each updates a range of the elements of some parameters, in fp32 either way. Left out: optimizers that keep fp32 values
inside themselves (precision-aware ones), and those on the CPU (hybrid ones).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.errors import NotSupported


@dataclass(frozen=True)
class Main:
    """What this rank's optimizer updates of a local parameter: its elements `start` to `stop`, counted flat.

    `values`: fp32, of the parameter's shape where all elements are here and of one dimension otherwise. `optimizer`:
    torch's, which has the moments of `values`; `group`: its parameter group.
    """

    values: Tensor
    start: int
    stop: int
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]

    @property
    def flat(self) -> Tensor:
        """`values` in one dimension, sharing their memory."""
        return self.values.detach().view(-1)

    def moment(self, kind: str) -> Tensor | None:
        """`exp_avg` or `exp_avg_sq`, flat, sharing its memory; None before the first step."""
        found = self.optimizer.state.get(self.values, {}).get(kind)
        return None if found is None else found.view(-1)

    def steps(self) -> int:
        """How many steps the moments have seen."""
        state = self.optimizer.state.get(self.values)
        if not state:
            return 0
        return int(state["step"] if "step" in state else self.group.get("step", 0))  # Apex and the like count a group's

    def set_moments(self, steps: int, first: Tensor, second: Tensor) -> None:
        """Go on from these moments, of the shape of `values`, which are kept."""
        state = {"exp_avg": first, "exp_avg_sq": second}
        if isinstance(self.optimizer, torch.optim.Adam):
            on_device = self.group.get("fused") or self.group.get("capturable")
            state["step"] = torch.tensor(float(steps), device=first.device if on_device else "cpu")
        else:
            self.group["step"] = max(int(self.group.get("step", 0)), steps)
        self.optimizer.state[self.values] = state


@dataclass(frozen=True)
class Share:
    """Elements `start` to `stop` of a local parameter, counted flat, that the rank `rank` of a group updates."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class Spread:
    """How a local parameter's elements are shared by the ranks of `group`, which is known without asking them."""

    group: dist.ProcessGroup
    shares: tuple[Share, ...]


class Mains:
    """The `Main` of each local parameter that `optimizer` updates; `optimizer`: what `get_megatron_optimizer` gives.

    Looked up anew each time that one is made: offloading replaces tensors.
    """

    def __init__(self, optimizer: Any | None, device: torch.device) -> None:
        """`device`: what the process groups move; what is put together is there."""
        self._device = device
        self._mains: dict[Tensor, Main] = {}
        self._spread: dict[Tensor, Spread] = {}
        for single in getattr(optimizer, "chained_optimizers", [optimizer]):
            if single is None or single.is_stub_optimizer:
                continue
            _require_known(single)
            self._mains.update(_mains_of(single))
            self._spread.update(_spread_of(single))

    def of(self, parameter: Tensor) -> Main | None:
        """What this rank updates of it; None: nothing."""
        return self._mains.get(parameter)

    def trains(self, parameter: Tensor) -> bool:
        """Whether it is updated, on this rank or on another with the same part of the model. No collective."""
        return parameter in self._mains or parameter in self._spread

    def whole(self, parameter: Tensor, kind: str = "values") -> Tensor:
        """All elements of `parameter` in fp32, of its shape: its `values`, or the moment `exp_avg` or `exp_avg_sq`.

        Collective over the data-parallel ranks where they are spread. Shares memory with what is trained where it can.
        Values that no optimizer has in fp32 are the parameter's own.
        """
        if kind == "values" and (parameter.dtype == torch.float32 or not self.trains(parameter)):
            return parameter.detach().float()
        main = self.of(parameter)
        mine = None if main is None else main.flat if kind == "values" else main.moment(kind)
        spread = self._spread.get(parameter)
        if spread is None:
            found = torch.zeros_like(parameter, dtype=torch.float32) if mine is None else mine
        else:
            found = _gathered(parameter.numel(), main, mine, spread, self._device)
        return found.view(parameter.shape)


def _gathered(size: int, main: Main | None, mine: Tensor | None, spread: Spread, device: torch.device) -> Tensor:
    """The `size` elements of a parameter from all ranks, flat. Moments that are not there yet are zeros."""
    found = torch.zeros(size, device=device)
    if main is not None and mine is not None:
        found[main.start : main.stop].copy_(mine)
    if spread.group.size() > 1:
        for share in spread.shares:
            dist.broadcast(found[share.start : share.stop], group=spread.group, group_src=share.rank)
    return found


# -- the three kinds --------------------------------------------------------------------------------------------------


def _require_known(optimizer: Any) -> None:
    inner = type(optimizer.optimizer).__name__
    if inner == "HybridDeviceOptimizer" or optimizer.config.use_precision_aware_optimizer:
        raise NotSupported(
            f"the optimizer's state cannot be told: {inner} of megatron-core holds it in a form of its own; leave "
            "use_precision_aware_optimizer and optimizer_cpu_offload unset"
        )


def _mains_of(optimizer: Any) -> Iterator[tuple[Tensor, Main]]:
    inner = optimizer.optimizer
    for parameter, values, group in _pairs(optimizer):
        start, stop = 0, parameter.numel()
        if _is_distributed(optimizer):
            where = optimizer._get_model_param_range_map(parameter)["param"]
            start, stop = where.start, where.end
        yield parameter, Main(values, start, stop, inner, group)


def _pairs(optimizer: Any) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    """Parameters of the model, what is updated of each, and its parameter group."""
    if _is_distributed(optimizer):
        names = ("model_float16_groups", "shard_fp32_from_float16_groups"), ("model_fp32_groups", "shard_fp32_groups")
    elif hasattr(optimizer, "float16_groups"):
        names = ("float16_groups", "fp32_from_float16_groups"), ("fp32_from_fp32_groups", "fp32_from_fp32_groups")
    else:
        for group in optimizer.optimizer.param_groups:
            yield from ((parameter, parameter, group) for parameter in group["params"])
        return
    for models, mains in names:
        groups = zip(
            getattr(optimizer, models), getattr(optimizer, mains), optimizer.optimizer.param_groups, strict=True
        )
        for parameters, values, group in groups:
            yield from ((*pair, group) for pair in zip(parameters, values, strict=True))


def _spread_of(optimizer: Any) -> Iterator[tuple[Tensor, Spread]]:
    for buffer in optimizer.buffers if _is_distributed(optimizer) else ():
        ranks = buffer.data_parallel_group.size()
        for parameter, (start, stop, bucket) in buffer.param_index_map.items():
            shares = shares_of(start, stop, buffer.bucket_indices[bucket], ranks)
            yield parameter, Spread(buffer.data_parallel_group, tuple(shares))


def shares_of(start: int, stop: int, bucket: tuple[int, int], ranks: int) -> Iterator[Share]:
    """Who has what of a parameter at `start` to `stop` of a flat buffer: `ranks` share its `bucket` in equal parts."""
    size = (bucket[1] - bucket[0]) // ranks
    for rank in range(ranks):
        first = max(start, bucket[0] + rank * size)
        last = min(stop, bucket[0] + (rank + 1) * size)
        if first < last:
            yield Share(rank, first - start, last - start)


def _is_distributed(optimizer: Any) -> bool:
    return hasattr(optimizer, "gbuf_ranges")
