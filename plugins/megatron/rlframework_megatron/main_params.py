"""The main parameters of Megatron's optimizers: the fp32 values they update for each local parameter, and the moments.

Three optimizers are supported. The plain fp32 optimizer updates the parameters themselves. The bfloat16 optimizer
updates an fp32 copy of each. The distributed optimizer shards the flat parameter buffers across the data-parallel
ranks; each rank updates a range of elements of some parameters, always in fp32. Not supported: precision-aware
optimizers, which keep fp32 values internally, and hybrid CPU optimizers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from rlframework.base.errors import NotSupported
from rlframework_megatron.gradients import single_optimizers


@dataclass(frozen=True)
class MainParam:
    """The flat elements `start` to `stop` of a local parameter, updated by this rank's optimizer.

    `values`: fp32, with the parameter's shape if all elements are local, else one-dimensional. `optimizer`: the torch
    optimizer that holds the moments of `values`; `group`: its parameter group.
    """

    values: Tensor
    start: int
    stop: int
    optimizer: torch.optim.Optimizer
    group: dict[str, Any]

    @property
    def flat(self) -> Tensor:
        """A one-dimensional view of `values`."""
        return self.values.detach().view(-1)

    def moment(self, kind: str) -> Tensor | None:
        """A flat view of `exp_avg` or `exp_avg_sq`; None before the first step."""
        found = self.optimizer.state.get(self.values, {}).get(kind)
        return None if found is None else found.view(-1)

    def steps(self) -> int:
        """The number of optimizer steps the moments have accumulated."""
        state = self.optimizer.state.get(self.values)
        if not state:
            return 0
        return int(state["step"] if "step" in state else self.group.get("step", 0))  # Apex counts steps per group

    def set_moments(self, steps: int, first: Tensor, second: Tensor) -> None:
        """Replace the moments; `first` and `second` have the shape of `values` and are not copied."""
        state = {"exp_avg": first, "exp_avg_sq": second}
        if isinstance(self.optimizer, torch.optim.Adam):
            on_device = self.group.get("fused") or self.group.get("capturable")
            state["step"] = torch.tensor(float(steps), device=first.device if on_device else "cpu")
        else:
            self.group["step"] = max(int(self.group.get("step", 0)), steps)
        self.optimizer.state[self.values] = state


@dataclass(frozen=True)
class FlatShard:
    """The flat elements `start` to `stop` of a local parameter that rank `rank` of a group updates."""

    rank: int
    start: int
    stop: int


@dataclass(frozen=True)
class FlatSharding:
    """How a local parameter's elements are sharded across the ranks of `group`; computed without communication."""

    group: dist.ProcessGroup
    shards: tuple[FlatShard, ...]


class MainParams:
    """The `MainParam` of each local parameter that `optimizer` (from `get_megatron_optimizer`) updates.

    Do not keep instances across offloading, which replaces tensors.
    """

    def __init__(self, optimizer: Any | None, device: torch.device) -> None:
        """`device`: where the process groups communicate and gathered tensors are allocated."""
        self._device = device
        self._main_params: dict[Tensor, MainParam] = {}
        self._shardings: dict[Tensor, FlatSharding] = {}
        for single in single_optimizers(optimizer):
            if single is None or single.is_stub_optimizer:
                continue
            _require_known(single)
            self._main_params.update(_main_params_of(single))
            self._shardings.update(_shardings_of(single))

    def of(self, parameter: Tensor) -> MainParam | None:
        """The main parameter of `parameter` on this rank; None if this rank updates none of it."""
        return self._main_params.get(parameter)

    @property
    def sharded(self) -> bool:
        """Whether each data-parallel rank updates a part of the parameters."""
        return bool(self._shardings)

    def trains(self, parameter: Tensor) -> bool:
        """Whether `parameter` is updated, on this rank or on a replica of it. Not collective."""
        return parameter in self._main_params or parameter in self._shardings

    def whole(self, parameter: Tensor, kind: str = "values") -> Tensor:
        """All elements of `parameter` in fp32 and its shape: its `values`, or the moment `exp_avg` or `exp_avg_sq`.

        Collective over the data-parallel ranks if they are sharded. Shares memory with the trained tensor if possible.
        Values without an fp32 copy in an optimizer are read from the parameter itself.
        """
        if kind == "values" and (parameter.dtype == torch.float32 or not self.trains(parameter)):
            return parameter.detach().float()
        main = self.of(parameter)
        local = None if main is None else main.flat if kind == "values" else main.moment(kind)
        sharding = self._shardings.get(parameter)
        if sharding is None:
            found = torch.zeros_like(parameter, dtype=torch.float32) if local is None else local
        else:
            found = _gathered(parameter.numel(), main, local, sharding, self._device)
        return found.view(parameter.shape)


def _gathered(
    size: int, main: MainParam | None, local: Tensor | None, sharding: FlatSharding, device: torch.device
) -> Tensor:
    """Gather the `size` flat elements of a parameter from all ranks. Missing moments are zeros."""
    found = torch.zeros(size, device=device)
    if main is not None and local is not None:
        found[main.start : main.stop].copy_(local)
    if sharding.group.size() > 1:
        for share in sharding.shards:
            dist.broadcast(found[share.start : share.stop], group=sharding.group, group_src=share.rank)
    return found


# -- the three optimizers ---------------------------------------------------------------------------------------------


def _require_known(optimizer: Any) -> None:
    inner = type(optimizer.optimizer).__name__
    if inner == "HybridDeviceOptimizer" or optimizer.config.use_precision_aware_optimizer:
        raise NotSupported(
            f"the optimizer state cannot be read: megatron-core's {inner} stores it in an internal form; leave "
            "use_precision_aware_optimizer and optimizer_cpu_offload unset"
        )


def _main_params_of(optimizer: Any) -> Iterator[tuple[Tensor, MainParam]]:
    inner = optimizer.optimizer
    for parameter, values, group in _pairs(optimizer):
        start, stop = 0, parameter.numel()
        if _is_distributed(optimizer):
            where = optimizer._get_model_param_range_map(parameter)["param"]
            start, stop = where.start, where.end
        yield parameter, MainParam(values, start, stop, inner, group)


def _pairs(optimizer: Any) -> Iterator[tuple[Tensor, Tensor, dict[str, Any]]]:
    """Yield each model parameter, its updated values and its parameter group."""
    if _is_distributed(optimizer):
        names = ("model_float16_groups", "shard_fp32_from_float16_groups"), ("model_fp32_groups", "shard_fp32_groups")
    elif hasattr(optimizer, "float16_groups"):
        names = ("float16_groups", "fp32_from_float16_groups"), ("fp32_from_fp32_groups", "fp32_from_fp32_groups")
    else:
        for group in optimizer.optimizer.param_groups:
            yield from ((parameter, parameter, group) for parameter in group["params"])
        return
    for models, main_params in names:
        groups = zip(
            getattr(optimizer, models), getattr(optimizer, main_params), optimizer.optimizer.param_groups, strict=True
        )
        for parameters, values, group in groups:
            yield from ((*pair, group) for pair in zip(parameters, values, strict=True))


def _shardings_of(optimizer: Any) -> Iterator[tuple[Tensor, FlatSharding]]:
    for buffer in optimizer.buffers if _is_distributed(optimizer) else ():
        ranks = buffer.data_parallel_group.size()
        for parameter, (start, stop, bucket) in buffer.param_index_map.items():
            shards = flat_shards_of(start, stop, buffer.bucket_indices[bucket], ranks)
            yield parameter, FlatSharding(buffer.data_parallel_group, tuple(shards))


def flat_shards_of(start: int, stop: int, bucket: tuple[int, int], ranks: int) -> Iterator[FlatShard]:
    """Shards of a parameter at `start` to `stop` of a flat buffer whose `bucket` is split equally across `ranks`."""
    size = (bucket[1] - bucket[0]) // ranks
    for rank in range(ranks):
        first = max(start, bucket[0] + rank * size)
        last = min(stop, bucket[0] + (rank + 1) * size)
        if first < last:
            yield FlatShard(rank, first - start, last - start)


def _is_distributed(optimizer: Any) -> bool:
    return hasattr(optimizer, "gbuf_ranges")
