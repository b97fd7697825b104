"""What ZeRO keeps of each parameter on this rank: which range of it, in fp32, and the optimizer's state beside it.

Whatever the stage, what a rank trains of a parameter is a range of its elements in one row (`Slot`), part of an fp32
tensor that the optimizer knows; the forward computes with copies of it, whole or in pieces, in the dtype of
`policy.precision`. `Shards` has what all stages share; the stages themselves are in `zero`.

What is not trained has no fp32 copy: its slot is the parameter itself, in the dtype that it has.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

MOMENTS = ("exp_avg", "exp_avg_sq")
Read = Callable[[int, int], Tensor]
"""`read(first, end)`: that range of a parameter's value in one row, of any dtype and device."""


@dataclass(frozen=True)
class Slot:
    """Elements `first` to `first + count` of a parameter in one row: they lie in `holder`, in one row, from `offset`.

    `holder` is what the optimizer steps, or the parameter itself where it is not trained.
    """

    holder: Tensor
    offset: int
    count: int
    first: int

    def of(self, tensor: Tensor) -> Tensor:
        """The elements of it in `tensor`, which is like `holder`; they share its memory."""
        return tensor.detach().view(-1)[self.offset : self.offset + self.count]

    @property
    def main(self) -> Tensor:
        """The elements themselves."""
        return self.of(self.holder)


class Shards(ABC):
    """The parameters of `engine` (of DeepSpeed) as its stage of ZeRO keeps them."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.wrapper = engine.optimizer  # DeepSpeed's, around torch's
        self.adam: torch.optim.Optimizer | None = engine.basic_optimizer
        self.group: dist.ProcessGroup = engine.seq_data_parallel_group
        self.ranks: int = dist.get_world_size(self.group)

    # -- what differs -------------------------------------------------------------------------------------------------

    @abstractmethod
    def slot(self, parameter: nn.Parameter) -> Slot | None:
        """What of `parameter` is trained here; None: nothing."""

    @abstractmethod
    def whole(self, parameter: nn.Parameter) -> Tensor:
        """All of `parameter`, of the trained elements. Collective."""

    @abstractmethod
    def publish(self) -> None:
        """Bring what the forward computes with to what is in the slots now. Collective."""

    @abstractmethod
    def put(self, parameter: nn.Parameter, read: Read) -> None:
        """Set `parameter` to a new value: the slot, and what the forward computes with. No collective."""

    @abstractmethod
    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """The gradients that are here, scaled as the loss was, with the parameters that they are of.

        Of each parameter the ranks of `group` have different elements where `splits_gradients`, else all the same.
        """

    @abstractmethod
    def discard(self) -> None:
        """Forget gradients, those of a backward that did not come to its end too."""

    def recover(self) -> None:
        """Make DeepSpeed forget that it is in a forward or backward: the one before failed, and it waits for its end.

        No collective.
        """
        if hasattr(self.wrapper, "clear_backward_seen_flag"):
            self.wrapper._backward_active_depth = 0
            self.wrapper._epilogue_ran_this_backward = False
            self.wrapper.clear_backward_seen_flag()

    @property
    def splits_gradients(self) -> bool:
        """Whether each rank has other elements of the gradient."""
        return True

    # -- what does not ------------------------------------------------------------------------------------------------

    def shape(self, parameter: nn.Parameter) -> tuple[int, ...]:
        """Of all of `parameter` before ZeRO deals it out."""
        return tuple(getattr(parameter, "ds_shape", parameter.shape))

    def dtype(self, parameter: nn.Parameter) -> torch.dtype:
        """Of the trained elements."""
        return torch.float32 if self.is_trained(parameter) else parameter.dtype

    def is_trained(self, parameter: nn.Parameter) -> bool:
        """Whether the optimizer has it. Not by `requires_grad`, which peft switches."""
        return id(parameter) in self.trained

    @cached_property
    def trained(self) -> set[int]:
        """The ids of the parameters that the optimizer has."""
        return {id(parameter) for group in self._groups() for parameter in group}

    def _groups(self) -> list[list[nn.Parameter]]:
        """The parameters of the model by groups of the optimizer."""
        raise NotImplementedError

    def scale(self) -> float:
        """What gradients are larger by than they should be, in float16."""
        return float(getattr(self.wrapper, "loss_scale", 1.0) or 1.0)

    def own_scale(self) -> float:
        """What the loss has to be multiplied by for that, where DeepSpeed's backward does not do it."""
        return 1.0

    def state(self, parameter: nn.Parameter) -> tuple[int, dict[str, Tensor]]:
        """Steps of the optimizer, and the moments of what is trained here; none of them before the first step."""
        slot = self.slot(parameter)
        found = self.adam.state.get(slot.holder) if slot is not None and self.adam is not None else None
        if not found or slot is None:
            return 0, {}
        return int(found["step"]), {name: slot.of(found[name]) for name in MOMENTS}

    def make_state(self, parameter: nn.Parameter, steps: int) -> dict[str, Tensor]:
        """The moments of what is trained here, to be written to; made where no step has been taken."""
        slot = self.slot(parameter)
        assert self.adam is not None
        if slot is None:
            return {}
        found = self.adam.state[slot.holder]
        if not found:
            found["step"] = torch.zeros((), device=slot.holder.device if slot.holder.is_cuda else None)
            found.update({name: torch.zeros_like(slot.holder, requires_grad=False) for name in MOMENTS})
        found["step"].fill_(float(steps))
        return {name: slot.of(found[name]) for name in MOMENTS}

    def all_of(self, parameter: nn.Parameter, part: Tensor | None) -> Tensor:
        """The whole of what each rank has `part` of, in the places of its slot, in fp32. Collective."""
        slot, shape = self.slot(parameter), self.shape(parameter)
        row = torch.zeros(math.prod(shape), dtype=torch.float32, device=self.engine.device)
        if slot is not None and part is not None:
            row[slot.first : slot.first + slot.count] = part
        if self.ranks > 1:
            dist.all_reduce(row.view(torch.int32), group=self.group)  # as whole numbers: bit for bit
        return row.view(shape)
