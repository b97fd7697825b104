"""The ZeRO stages as `Shards`: where each stores a rank's shard of a parameter, and how to gather it."""

from __future__ import annotations

import math
from abc import ABC
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlframework.engine import replacing
from rlframework_deepspeed.partial_steps import ranges_of, step_ranges
from rlframework_deepspeed.process_state import all_gather
from rlframework_deepspeed.shards import Read, Shards, Slot, state_of


class _WholeWeights(Shards, ABC):
    """Stages whose forward computes with whole weights: 0, 1, 2."""

    def put(self, parameter: nn.Parameter, read: Read) -> None:
        """See `Shards.put`."""
        value = read(0, math.prod(self.shape(parameter)))
        parameter.detach().view(-1).copy_(value)
        slot = self.slot(parameter)
        if slot is not None and slot.holder is not parameter:
            slot.main.copy_(value[slot.first : slot.first + slot.count])


class Stage0(_WholeWeights):
    """No ZeRO: everything is replicated, and gradients are summed over all ranks."""

    splits_gradients = False

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        if self.wrapper is not self.adam and self.adam is not None:
            self.adam.state.clear()  # in half precision DeepSpeed takes a step to create the state
        copies = zip(self._groups(), getattr(self.wrapper, "fp32_groups", ()), strict=False)
        self._main: dict[int, Tensor] = {
            id(one): main for group, mains in copies for one, main in zip(group, mains, strict=True)
        }

    def _groups(self) -> list[list[nn.Parameter]]:
        if self.adam is None:
            return []
        halves = getattr(self.wrapper, "fp16_groups", None)
        return halves if halves is not None else [group["params"] for group in self.adam.param_groups]

    def slot(self, parameter: nn.Parameter) -> Slot | None:
        """See `Shards.slot`."""
        return Slot(self._main.get(id(parameter), parameter), 0, parameter.numel(), 0)

    def whole(self, parameter: nn.Parameter) -> Tensor:
        """See `Shards.whole`."""
        found: Tensor = self._main.get(id(parameter), parameter)
        return found.detach()

    def all_of(self, parameter: nn.Parameter, part: Tensor | None) -> Tensor:
        """See `Shards.all_of`: everything is local."""
        shape = self.shape(parameter)
        return torch.zeros(shape) if part is None else part.view(shape)

    @torch.no_grad()
    def publish(self) -> None:
        """See `Shards.publish`."""
        for group in self._groups():
            for parameter in group:
                if (main := self._main.get(id(parameter))) is not None:
                    parameter.copy_(main)

    def _gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """See `Shards._gradients`."""
        for group in self._groups():
            for parameter in group:
                if parameter.grad is not None:
                    yield parameter, parameter.grad

    def discard(self) -> None:
        """See `Shards.discard`."""
        super().discard()
        self.engine.module.zero_grad(set_to_none=True)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """See `Shards.stepping`: DeepSpeed has set missing gradients to zeros."""
        assert self.adam is not None
        unreached = [one for group in self._groups() for one in group if id(one) not in self.reached]
        step = self.adam.step

        def step_reached(closure: None = None) -> None:
            for one in unreached:
                self._main.get(id(one), one).grad = None
            step()

        with replacing(self.adam, step=step_reached):
            yield

    def steps(self, parameter: nn.Parameter) -> int:
        """See `Shards.steps`."""
        assert self.adam is not None
        state = self.adam.state.get(self._main.get(id(parameter), parameter))
        return int(state["step"]) if state else 0

    def set_steps(self, steps: Mapping[nn.Parameter, int]) -> None:
        """See `Shards.set_steps`."""
        assert self.adam is not None
        for parameter, count in steps.items():
            state_of(self.adam, self._main.get(id(parameter), parameter))["step"].fill_(float(count))

    def own_scale(self) -> float:
        """See `Shards.own_scale`: the engine's backward scales only under ZeRO, but the step always divides."""
        return self.scale()


class _FlatState(Shards, ABC):
    """Stages whose optimizer has flat tensors of many parameters: 1, 2, 3. AdamW's count of steps is the largest."""

    def __init__(self, engine: Any) -> None:
        super().__init__(engine)
        self._steps = dict.fromkeys(self.trained, 0)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """See `Shards.stepping`."""
        is_whole = len(self.reached) == len(self.trained) and len(set(self._steps.values())) == 1
        with nullcontext() if is_whole else self._stepping_ranges():
            yield
        for one in self.reached:
            self._steps[one] += 1
        if not is_whole:
            self._set_count()

    def _stepping_ranges(self) -> AbstractContextManager[None]:
        slots: defaultdict[int, list[tuple[Slot, int]]] = defaultdict(list)
        for parameter in (one for group in self._groups() for one in group if id(one) in self.reached):
            if (slot := self.slot(parameter)) is not None:
                slots[id(slot.holder)].append((slot, self._steps[id(parameter)]))
        ranges = {holder: ranges_of(found) for holder, found in slots.items()}
        adam = self.adam
        assert adam is not None
        return replacing(adam, step=lambda closure=None: step_ranges(adam, ranges))

    def steps(self, parameter: nn.Parameter) -> int:
        """See `Shards.steps`."""
        return self._steps[id(parameter)]

    def set_steps(self, steps: Mapping[nn.Parameter, int]) -> None:
        """See `Shards.set_steps`."""
        self._steps.update({id(parameter): count for parameter, count in steps.items()})
        assert self.adam is not None
        for parameter, count in steps.items():
            if count and (slot := self.slot(parameter)) is not None:
                state_of(self.adam, slot.holder)
        self._set_count()

    def _set_count(self) -> None:
        assert self.adam is not None
        for state in self.adam.state.values():
            state["step"].fill_(float(max(self._steps.values())))


class Stage12(_FlatState, _WholeWeights):
    """Shards the optimizer state (1) and gradients (2)."""

    def _groups(self) -> list[list[nn.Parameter]]:
        return list(self.wrapper.bit16_groups)

    def slot(self, parameter: nn.Parameter) -> Slot | None:
        """See `Shards.slot`."""
        if not self.is_trained(parameter):
            return Slot(parameter, 0, parameter.numel(), 0)
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

    def _gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """See `Shards._gradients`."""
        if self.wrapper.cpu_offload:
            self.wrapper._wait_for_offload_copies()  # which would otherwise still be under way
            for group in self._groups():
                for parameter in group:
                    slot = self.slot(parameter)
                    if slot is not None and slot.holder.grad is not None:
                        yield parameter, slot.of(slot.holder.grad)
            return
        for number, parameters in enumerate(self.wrapper.params_in_partition):
            found = self.wrapper.averaged_gradients.get(number) or ()
            parts = [part for part in found if not getattr(part, "_zero_padding", False)]
            yield from zip(parameters, parts, strict=False)  # padding may follow the last one

    def discard(self) -> None:
        """See `Shards.discard`."""
        super().discard()
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


class Stage3(_FlatState):
    """Shards weights too; each is gathered when its module runs."""

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
        """See `Shards.all_of`: shards have equal size, the last ones padded."""
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
        """See `Shards.publish`: gathers again the small weights that ZeRO keeps whole."""
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
        if parameter.numel():  # kept whole
            parameter.detach().view(-1).copy_(read(0, math.prod(self.shape(parameter))))

    def _gradients(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """See `Shards._gradients`."""
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
        super().discard()
        wrapper = self.wrapper
        wrapper.zero_grad(set_to_none=True)
        wrapper.averaged_gradients = {}
        wrapper.grad_partitions_flat_buffer.zero_()  # else a later microbatch adds to an earlier step's gradient
        for bucket in wrapper.ipg_buckets.values():
            bucket.clear_params()
        for number in wrapper.params_already_reduced:
            wrapper.params_already_reduced[number] = False
        if wrapper.offload_optimizer:
            wrapper.reset_cpu_buffers()
        wrapper._offload_boundary_param_ids = set()

    def recover(self) -> None:
        """See `Shards.recover`: also releases gathered weights."""
        super().recover()
        self._offload().partition_all_parameters()


def shards_of(engine: Any) -> Shards:
    """The `Shards` of `engine`, for its ZeRO stage."""
    stage = int(engine.zero_optimization_stage())
    kinds: tuple[type[Shards], ...] = (Stage0, Stage12, Stage12, Stage3)
    return kinds[stage](engine)
