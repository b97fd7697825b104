"""ZeRO's shard of each parameter on this rank: a flat fp32 range, and its optimizer state.

In every stage, a rank trains a flat range of a parameter's elements (`Slot`) inside an fp32 tensor of the optimizer;
the forward computes with whole or sharded copies in the dtype of `policy.precision`. `Shards` is the common interface
of the stages, which `zero` implements.

Frozen parameters have no fp32 copy: their slot is the parameter itself, in its own dtype.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
Read = Callable[[int, int], Tensor]
"""`read(first, end)`: a flat range of a parameter's value, of any dtype and device."""


@dataclass(frozen=True)
class Slot:
    """The flat elements `first` to `first + count` of a parameter, stored in the flat `holder` from `offset` on.

    `holder` is the tensor that the optimizer updates, or the parameter itself if it is frozen.
    """

    holder: Tensor
    offset: int
    count: int
    first: int

    def of(self, tensor: Tensor) -> Tensor:
        """The slot's elements of `tensor`, which is shaped like `holder`, as a view."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.count]

    @property
    def main(self) -> Tensor:
        """The slot's main-parameter values."""
        return self.of(self.holder)


class Shards(ABC):
    """The parameters of a DeepSpeed `engine` as sharded by its ZeRO stage."""

    splits_gradients: ClassVar[bool] = True
    """Whether the ranks hold different elements of the gradient."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.wrapper = engine.optimizer  # DeepSpeed's, around torch's
        self.adam: torch.optim.Optimizer | None = engine.basic_optimizer
        self.group: dist.ProcessGroup = engine.seq_data_parallel_group
        self.ranks: int = dist.get_world_size(self.group)
        self.reached: set[int] = set()
        """The ids of the parameters that a backward of this step gave a gradient."""
        reached = self.reached
        for parameter in engine.module.parameters():
            if self.is_trained(parameter):
                parameter.register_post_accumulate_grad_hook(lambda parameter: reached.add(id(parameter)))

    # -- specific to a stage ------------------------------------------------------------------------------------------

    @abstractmethod
    def slot(self, parameter: nn.Parameter) -> Slot | None:
        """The range of `parameter` on this rank; None if it has none."""

    @abstractmethod
    def whole(self, parameter: nn.Parameter) -> Tensor:
        """Gather the whole `parameter` from the trained elements. Collective."""

    @abstractmethod
    def publish(self) -> None:
        """Update the forward's weights from the slots. Collective."""

    @abstractmethod
    def put(self, parameter: nn.Parameter, read: Read) -> None:
        """Set `parameter` to a new value, in the slot and for the forward. Not collective."""

    @abstractmethod
    def _gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the local gradients; of parameters that no backward reached, zeros or a past gradient."""

    @abstractmethod
    def discard(self) -> None:
        """Discard all gradients, including those of an unfinished backward."""
        self.reached.clear()

    @abstractmethod
    def stepping(self) -> AbstractContextManager[None]:
        """The context of DeepSpeed's step: parameters that are not in `reached` are left alone, as by torch."""

    @abstractmethod
    def steps(self, parameter: nn.Parameter) -> int:
        """The number of steps of `parameter`."""

    @abstractmethod
    def set_steps(self, steps: Mapping[nn.Parameter, int]) -> None:
        """Set the numbers of steps of all trained parameters."""

    def recover(self) -> None:
        """Reset DeepSpeed's forward/backward state after a failed pass. Not collective."""
        if hasattr(self.wrapper, "clear_backward_seen_flag"):
            self.wrapper._backward_active_depth = 0
            self.wrapper._epilogue_ran_this_backward = False
            self.wrapper.clear_backward_seen_flag()

    # -- common to all stages -----------------------------------------------------------------------------------------

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Yield the local gradients with their parameters, scaled like the loss.

        If `splits_gradients`, the ranks of `group` have different elements of each parameter, else the same.
        """
        return ((parameter, gradient) for parameter, gradient in self._gradients() if id(parameter) in self.reached)

    def share_reached(self) -> None:
        """Add to `reached` what a backward of another rank reached: the gradient is the sum over ranks. Collective."""
        if self.ranks == 1:
            return
        order = [id(parameter) for group in self._groups() for parameter in group]
        flags = torch.tensor([one in self.reached for one in order], dtype=torch.uint8, device=self.engine.device)
        dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self.group)
        self.reached.update(one for one, flag in zip(order, flags.tolist(), strict=True) if flag)

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """The shape of `parameter` before ZeRO shards it."""
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """The dtype of the trained elements."""
        return torch.float32 if self.is_trained(parameter) else parameter.dtype

    def is_trained(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer has `parameter`. Ignores `requires_grad`, which peft switches."""
        return id(parameter) in self.trained

    @cached_property
    def trained(self) -> set[int]:
        """The ids of the optimizer's parameters."""
        return {id(parameter) for group in self._groups() for parameter in group}

    def _groups(self) -> list[list[nn.Parameter]]:
        """The model's parameters by optimizer group."""
        raise NotImplementedError

    def scale(self) -> float:
        """The loss scale of the gradients, in float16."""
        return float(getattr(self.wrapper, "loss_scale", 1.0) or 1.0)

    def own_scale(self) -> float:
        """The factor to scale the loss by, if DeepSpeed's backward does not scale it."""
        return 1.0

    def state(self, parameter: nn.Parameter) -> tuple[int, dict[str, Tensor]]:
        """The number of steps of `parameter`, and the local moments; no moments before the first step."""
        slot = self.slot(parameter)
        found = self.adam.state.get(slot.holder) if slot is not None and self.adam is not None else None
        if not found or slot is None:
            return 0, {}
        return self.steps(parameter), {name: slot.of(found[name]) for name in MOMENTS}

    def make_state(self, parameter: nn.Parameter) -> None:
        """Create the local moments, if there are none before the first step."""
        assert self.adam is not None
        if (slot := self.slot(parameter)) is not None:
            state_of(self.adam, slot.holder)

    def all_of(self, parameter: nn.Parameter, part: Tensor | None) -> Tensor:
        """Gather a whole fp32 tensor from each rank's `part`, located by its slot. Collective."""
        slot, shape = self.slot(parameter), self.shape(parameter)
        row = torch.zeros(math.prod(shape), dtype=torch.float32, device=self.engine.device)
        if slot is not None and part is not None:
            row[slot.first : slot.first + slot.count] = part
        if self.ranks > 1:
            dist.all_reduce(row.view(torch.int32), group=self.group)  # as integers: bit-exact
        return row.view(shape)


def state_of(adam: torch.optim.Optimizer, holder: Tensor) -> dict[str, Tensor]:
    """The state of `holder` in AdamW; created before the first step."""
    found: dict[str, Tensor] = adam.state[holder]
    if not found:
        found["step"] = torch.zeros((), device=holder.device if holder.is_cuda else None)
        found.update({name: torch.zeros_like(holder, requires_grad=False) for name in MOMENTS})
    return found
