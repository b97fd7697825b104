"""What ZeRO keeps of each parameter on this rank: which range of it, in fp32, and the optimizer's state beside it.

Whatever the stage, what a rank trains of a parameter is a range of its elements in one row (`Slot`), part of an fp32
tensor that the optimizer knows; the forward computes with copies of it, whole or in pieces, in the dtype of
`policy.precision`. `Shards` has what all stages share, and `shards_of` finds the one for an engine.

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

from rlframework_deepspeed.environment import all_gather

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


class _WholeWeights(Shards, ABC):
    """Stages whose forward computes with whole weights: 0, 1, 2."""

    def put(self, parameter: nn.Parameter, read: Read) -> None:
        """See `Shards.put`."""
        value = read(0, math.prod(self.shape(parameter)))
        parameter.detach().view(-1).copy_(value)
        slot = self.slot(parameter)
        if slot is not None and slot.holder is not parameter:
            slot.main.copy_(value[slot.first : slot.first + slot.count])

    def _itself(self, parameter: nn.Parameter) -> Slot:
        return Slot(parameter, 0, parameter.numel(), 0)


class Stage0(_WholeWeights):
    """No ZeRO: everything is whole on every rank, and gradients are added up over all of them."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        if self.wrapper is not self.adam and self.adam is not None:
            self.adam.state.clear()  # in half precision DeepSpeed takes a step by itself, to make the state
        copies = zip(self._groups(), getattr(self.wrapper, "fp32_groups", ()), strict=False)
        self._main: dict[int, Tensor] = {
            id(one): main for group, mains in copies for one, main in zip(group, mains, strict=True)
        }

    def _groups(self) -> list[list[nn.Parameter]]:
        if self.adam is None:
            return []
        halves = getattr(self.wrapper, "fp16_groups", None)
        return halves if halves is not None else [group["params"] for group in self.adam.param_groups]

    @property
    def splits_gradients(self) -> bool:
        """See `Shards.splits_gradients`."""
        return False

    def slot(self, parameter: nn.Parameter) -> Slot | None:
        """See `Shards.slot`."""
        return Slot(self._main.get(id(parameter), parameter), 0, parameter.numel(), 0)

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """See `Shards.whole`."""
        found: Tensor = self._main.get(id(parameter), parameter)
        return found.detach()

    def all_of(self, parameter: nn.Parameter, part: Tensor | None) -> Tensor:
        """See `Shards.all_of`: it is all here."""
        shape = self.shape(parameter)
        return torch.zeros(shape) if part is None else part.view(shape)

    @torch.no_grad()
    def publish(self) -> None:
        """See `Shards.publish`."""
        for group in self._groups():
            for parameter in group:
                if (main := self._main.get(id(parameter))) is not None:
                    parameter.copy_(main)

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """See `Shards.gradients`."""
        for group in self._groups():
            for parameter in group:
                if parameter.grad is not None:
                    yield parameter, parameter.grad

    def discard(self) -> None:
        """See `Shards.discard`."""
        self.engine.module.zero_grad(set_to_none=True)

    def own_scale(self) -> float:
        """See `Shards.own_scale`: the engine's backward multiplies under ZeRO only, and the step divides always."""
        return self.scale()


class Stage12(_WholeWeights):
    """The optimizer's state is dealt out (1), and gradients (2)."""

    def _groups(self) -> list[list[nn.Parameter]]:
        return list(self.wrapper.bit16_groups)

    def slot(self, parameter: nn.Parameter) -> Slot | None:
        """See `Shards.slot`."""
        if not self.is_trained(parameter):
            return self._itself(parameter)
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is None:
            return None
        here, there = mapping.hp_fragment_address, mapping.lp_fragment_address
        holder = self.wrapper.single_partition_of_fp32_groups[mapping.param_group_index]
        return Slot(holder, here.start, here.numel, there.start)

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """See `Shards.whole`."""
        if parameter.dtype == torch.float32 or not self.is_trained(parameter):
            return parameter.detach()
        slot = self.slot(parameter)
        return self.all_of(parameter, None if slot is None else slot.main)

    def publish(self) -> None:
        """See `Shards.publish`."""
        self.wrapper.update_lp_params()

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """See `Shards.gradients`."""
        if self.wrapper.cpu_offload:
            for group in self._groups():
                for parameter in group:
                    slot = self.slot(parameter)
                    if slot is not None and slot.holder.grad is not None:
                        yield parameter, slot.of(slot.holder.grad)
            return
        for number, parameters in enumerate(self.wrapper.params_in_partition):
            found = self.wrapper.averaged_gradients.get(number) or ()
            parts = [part for part in found if not getattr(part, "_zero_padding", False)]
            yield from zip(parameters, parts, strict=False)  # after the last there may be padding

    def discard(self) -> None:
        """See `Shards.discard`."""
        wrapper = self.wrapper
        wrapper.zero_grad(set_to_none=True)
        for number in range(len(wrapper.bit16_groups)):
            wrapper.averaged_gradients[number] = wrapper.all_grad_tensors[number] = None
        for bucket in wrapper.ipg_buckets.values():
            bucket.clear()
        wrapper.params_already_reduced = [False] * len(wrapper.params_already_reduced)
        wrapper.extra_large_param_to_reduce.clear()
        wrapper.previous_reduced_grads.clear()
        wrapper._release_ipg_buffers()
        wrapper.micro_step_id = -1
        if wrapper.cpu_offload:
            wrapper.reset_cpu_buffers()
            wrapper._offload_accumulated_param_ids = set()


class Stage3(Shards):
    """Weights too are dealt out: each is gathered where its module runs."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._places: dict[int, tuple[int, int]] = {}
        for number, group in enumerate(self._groups()):
            offset = 0
            for parameter in group:
                self._places[id(parameter)] = (number, offset)
                offset += parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]  # DeepSpeed put it there

    def _groups(self) -> list[list[nn.Parameter]]:
        return list(getattr(self.wrapper, "fp16_groups", ()))  # none without an optimizer

    def slot(self, parameter: nn.Parameter) -> Slot | None:
        """See `Shards.slot`."""
        piece: Any = parameter.ds_tensor  # type: ignore[attr-defined]
        size, total = int(piece.ds_numel), int(parameter.ds_numel)  # type: ignore[attr-defined]
        first = min(dist.get_rank(self.group) * size, total)
        count = min(size, total - first)
        if not count:
            return None
        if id(parameter) not in self._places:
            return Slot(piece, 0, count, first)
        number, offset = self._places[id(parameter)]
        return Slot(self.wrapper.fp32_partitioned_groups_flat[number], offset, count, first)

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """See `Shards.whole`."""
        slot = self.slot(parameter)
        return self.all_of(parameter, None if slot is None else slot.main)

    def all_of(self, parameter: nn.Parameter, part: Tensor | None) -> Tensor:
        """See `Shards.all_of`: the pieces are of one size, the last ones padded."""
        shape, size = self.shape(parameter), int(parameter.ds_tensor.ds_numel)  # type: ignore[attr-defined]
        own = torch.zeros(size, dtype=torch.float32, device=self.engine.device)
        if part is not None:
            own[: part.numel()] = part
        row = own.new_empty(size * self.ranks)
        all_gather(row, own, group=self.group)
        found: Tensor = row[: math.prod(shape)].view(shape)
        return found

    @torch.no_grad()
    def publish(self) -> None:
        """See `Shards.publish`: the small weights that ZeRO keeps gathered are gathered anew."""
        self._offload().partition_all_parameters()
        for group in self._groups():
            for parameter in group:
                self._to_piece(parameter)
        kept = self._offload().persistent_parameters
        if kept:
            kept[0].all_gather(kept)

    def _offload(self) -> Any:
        return getattr(self.wrapper, "parameter_offload", self.wrapper)

    def _to_piece(self, parameter: Any) -> None:
        slot, piece = self.slot(parameter), parameter.ds_tensor
        if slot is not None and slot.holder is not piece:
            piece.data[: slot.count].copy_(slot.main)

    def put(self, parameter: nn.Parameter, read: Read) -> None:
        """See `Shards.put`."""
        slot = self.slot(parameter)
        if slot is not None:
            slot.main.copy_(read(slot.first, slot.first + slot.count))
            self._to_piece(parameter)
        if parameter.numel():  # it is kept gathered
            parameter.detach().view(-1).copy_(read(0, math.prod(self.shape(parameter))))

    def gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """See `Shards.gradients`."""
        for number, group in enumerate(self._groups()):
            found = None if self.wrapper.offload_optimizer else self.wrapper.averaged_gradients.get(number)
            for index, parameter in enumerate(group):
                slot = self.slot(parameter)
                if slot is None:
                    continue
                if found is not None:
                    yield parameter, found[index].view(-1)[: slot.count]
                elif self.wrapper.offload_optimizer and slot.holder.grad is not None:
                    yield parameter, slot.of(slot.holder.grad)

    def discard(self) -> None:
        """See `Shards.discard`."""
        wrapper = self.wrapper
        wrapper.zero_grad(set_to_none=True)
        wrapper.averaged_gradients = {}
        for bucket in wrapper.ipg_buckets.values():
            bucket.clear_params()
        for number in wrapper.params_already_reduced:
            wrapper.params_already_reduced[number] = False
        if wrapper.offload_optimizer:
            wrapper.reset_cpu_buffers()
        wrapper._offload_boundary_param_ids = set()

    def recover(self) -> None:
        """See `Shards.recover`: weights that were gathered are let go of too."""
        super().recover()
        self._offload().partition_all_parameters()


def shards_of(engine: Any) -> Shards:
    """What `engine` keeps, by its stage of ZeRO."""
    stage = int(engine.zero_optimization_stage())
    kinds: tuple[type[Shards], ...] = (Stage0, Stage12, Stage12, Stage3)
    return kinds[stage](engine)
