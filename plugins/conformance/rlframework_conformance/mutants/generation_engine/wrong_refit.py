"""Mutants of the receiving side of transports, and of calls that an engine does not declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlframework.interfaces.generation import WeightReport
from rlframework.plugins.types import Capability
from rlframework.weight_sync.buffers import checksum
from rlframework.weight_sync.ipc import GroupHandles, ReceiveBuffer, open_memory
from rlframework_conformance.mutants.generation_engine.changes import model_of, observed
from rlframework_conformance.mutants.mutant import mutant

_HANDLES = "test_weights_come_through_handles"
_OFFER = "test_weights_come_into_memory_that_the_engine_offers"
_GROUP = "test_weights_come_over_a_process_group"
_DAMAGE = "test_damage_on_the_way_is_reported_by_name"
_SAME_SHAPE = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
_EMBEDDED = frozenset({Capability.EMBEDDED_GENERATION})


@mutant("transfer_unused", "Weights of a transport arrive, but those of the files are used.", _HANDLES, _GROUP, _OFFER,
        needs=_EMBEDDED)  # fmt: skip
def _transfer_unused(part: Any) -> type:
    class Broken(observed(part)):  # type: ignore[misc]
        def finish_weight_update(self) -> WeightReport:
            report: WeightReport = super().finish_weight_update()
            self.attach(model_of(self.directory), report.version)
            return report

    return Broken


@mutant("checksums_not_compared", "Checksums of the received bytes are not verified.", _DAMAGE, _OFFER)
def _checksums_not_compared(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, Any]) -> bool:
            ((device, group),) = ipc_handles.items()
            return bool(super().update_weights_from_ipc_handles({device: _with_own_checksums(group)}))

    return Broken


def _with_own_checksums(group: GroupHandles) -> GroupHandles:
    raw = open_memory(group.memory)  # type: ignore[arg-type]
    return replace(group, checksums=tuple(checksum(slot.of(raw)) for slot in group.slots))


@mutant("offsets_swapped", "The engine offers two weights each other's memory.", _OFFER)
def _offsets_swapped(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def offer_refit_memory(self) -> dict[str, Any]:
            return {device: _swapped(buffer) for device, buffer in super().offer_refit_memory().items()}

    return Broken


def _swapped(buffer: ReceiveBuffer) -> ReceiveBuffer:
    one, other = _SAME_SHAPE
    return replace(buffer, offsets={**buffer.offsets, one: buffer.offsets[other], other: buffer.offsets[one]})


@mutant("report_of_other_bytes", "The report's checksums are not of the bytes that were sent.", _HANDLES, _GROUP)
def _report_of_other_bytes(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def finish_weight_update(self) -> WeightReport:
            report: WeightReport = super().finish_weight_update()
            return replace(report, checksums={name: value + 1 for name, value in report.checksums.items()})

    return Broken


@mutant("report_of_another_version", "The report has the version of the update before.", _HANDLES, _GROUP, _OFFER)
def _report_of_another_version(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def finish_weight_update(self) -> WeightReport:
            report: WeightReport = super().finish_weight_update()
            return replace(report, version=report.version - 1)

    return Broken


@mutant(
    "undeclared_calls_ignored",
    "A refit that the engine does not support does nothing and reports success.",
    "test_calls_that_are_not_declared_are_rejected",
    break_record=lambda record: replace(
        record, capabilities=record.capabilities - {Capability.COLLECTIVE_REFIT, Capability.IPC_REFIT}
    ),
)
def _undeclared_ignored(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def init_collective(self, *_: Any, **__: Any) -> None: ...

        def update_weights_from_collective(self) -> bool:
            return True

        def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, Any]) -> bool:
            return True

    return Broken
