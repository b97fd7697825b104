"""Mutants of the receiving side of a refit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from rlframework.conformance.mutants.mutant import mutant
from rlframework.errors import UserError
from rlframework.weight_sync.buffers import checksum
from rlframework.weight_sync.ipc import GroupHandles, ReceiveBuffer

_HANDLES = "test_weights_come_through_handles"
_OFFER = "test_weights_come_into_memory_that_the_engine_offers"
_GROUP = "test_weights_come_over_a_process_group"
_MID_REFIT = "test_half_of_a_refit_does_not_generate"
_DAMAGE = "test_damage_on_the_way_is_told_by_name"
_SAME_SHAPE = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"


@mutant("first_refit_only", "Refits after the first are ignored.", _HANDLES, _GROUP)
def _first_refit_only(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        first = ""
        refits = 0

        def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, Any]) -> bool:
            (handles,) = ipc_handles.values()
            self.first = self.first or handles.refit
            return bool(super().update_weights_from_ipc_handles(ipc_handles)) if handles.refit == self.first else True

        def update_weights_from_collective(self) -> bool:
            kept = None if self.refits == 0 else getattr(self, "module", None)
            self.refits += 1
            before = None if kept is None else {name: value.clone() for name, value in kept.state_dict().items()}
            updated = bool(super().update_weights_from_collective())
            if before is not None:
                with torch.no_grad():
                    for name, value in self.module.state_dict().items():
                        value.copy_(before[name])
            return updated

        def attach(self, model: Any) -> None:
            super().attach(model)
            self.module = model

    return Broken


@mutant("checksums_not_compared", "Checksums of the received bytes are not verified.", _DAMAGE, _OFFER)
def _checksums_not_compared(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, Any]) -> bool:
            ((device, group),) = ipc_handles.items()
            return bool(super().update_weights_from_ipc_handles({device: self._with_own_checksums(group)}))

        def _with_own_checksums(self, group: GroupHandles) -> GroupHandles:
            raw = self._open_memory(group.memory)
            return replace(group, checksums=tuple(checksum(slot.of(raw)) for slot in group.slots))

    return Broken


@mutant("offered_memory_left", "The module does not use the memory that the engine offered.", _OFFER)
def _offered_memory_unused(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        module: Any = None

        def attach(self, model: Any) -> None:
            super().attach(model)
            self.module = model

        def offer_refit_memory(self) -> dict[str, Any]:
            buffers: dict[str, Any] = super().offer_refit_memory()
            if buffers:
                for parameter in self.module.parameters():
                    parameter.data = parameter.data.clone()
            return buffers

    return Broken


@mutant("rooms_swapped", "The engine offers two weights each other's memory.", _OFFER)
def _offsets_swapped(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def offer_refit_memory(self) -> dict[str, Any]:
            return {device: self._swapped(buffer) for device, buffer in super().offer_refit_memory().items()}

        def _swapped(self, buffer: ReceiveBuffer) -> ReceiveBuffer:
            one, other = _SAME_SHAPE
            swapped = {one: buffer.offsets[other], other: buffer.offsets[one]}
            return replace(buffer, offsets={**buffer.offsets, **swapped})

    return Broken


@mutant("offer_is_no_begin", "The engine generates while its weights are being written.", _OFFER)
def _offer_without_refit(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def offer_refit_memory(self) -> dict[str, Any]:
            kept = vars(self).copy()
            buffers: dict[str, Any] = super().offer_refit_memory()
            self.__dict__.update({name: kept.get(name) for name in ("_refit_now", "_model")})
            return buffers

    return Broken


@mutant("half_a_refit_borne", "The engine generates in the middle of a refit, with partly updated weights.", _MID_REFIT)
def _generates_mid_refit(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        module: Any = None

        def attach(self, model: Any) -> None:
            super().attach(model)
            self.module = model

        def generate(self, data: Any, greedy: bool = False) -> Any:
            try:
                return super().generate(data, greedy)
            except UserError:
                sound: Any = type(self).__mro__[1]
                engine: Any = sound.__new__(sound)
                engine.__dict__.update(vars(self), _refit_now=None, _refit_failed="")
                engine.attach(self.module)
                return engine.generate(data, greedy)

    return Broken
