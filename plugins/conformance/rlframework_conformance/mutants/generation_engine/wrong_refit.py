"""Mutants of the receiving side of transports, and of calls that an engine does not declare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rlframework.interfaces.generation import GenerationEngine
from rlframework.plugins.types import Capability
from rlframework.weight_sync.buffers import checksum
from rlframework.weight_sync.ipc import open_memory
from rlframework_conformance.mutants.generation_engine.changes import around_observed, model_of
from rlframework_conformance.mutants.mutant import around, mutant

_SAME_SHAPE = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"
_EMBEDDED = frozenset({Capability.EMBEDDED_GENERATION})


@mutant("transfer_unused", "Weights of a transport arrive, but those of the files are used.", needs=_EMBEDDED)
@around_observed(GenerationEngine.finish_weight_update)
def _transfer_unused(finish: Any, engine: Any) -> Any:
    report = finish()
    engine.attach(model_of(engine.directory), report.version)
    return report


@mutant("checksums_not_compared", "Checksums of the received bytes are not verified.")
@around(GenerationEngine.update_weights_from_ipc_handles)
def _checksums_not_compared(update: Any, _: Any, ipc_handles: Mapping[str, Any]) -> Any:
    ((device, group),) = ipc_handles.items()
    raw = open_memory(group.memory)
    return update({device: replace(group, checksums=tuple(checksum(slot.of(raw)) for slot in group.slots))})


@mutant("offsets_swapped", "The engine offers two weights each other's memory.")
@around(GenerationEngine.offer_refit_memory)
def _offsets_swapped(offer: Any, _: Any) -> dict[str, Any]:
    one, other = _SAME_SHAPE
    return {
        device: replace(buffer, offsets={**buffer.offsets, one: buffer.offsets[other], other: buffer.offsets[one]})
        for device, buffer in offer().items()
    }


@mutant("report_of_other_bytes", "The report's checksums are not of the bytes that were sent.")
@around(GenerationEngine.finish_weight_update)
def _report_of_other_bytes(finish: Any, _: Any) -> Any:
    report = finish()
    return replace(report, checksums={name: value + 1 for name, value in report.checksums.items()})


@mutant("report_of_another_version", "The report has the version of the update before.")
@around(GenerationEngine.finish_weight_update)
def _report_of_another_version(finish: Any, _: Any) -> Any:
    report = finish()
    return replace(report, version=report.version - 1)


@mutant(
    "undeclared_calls_ignored",
    "A refit that the engine does not support does nothing and reports success.",
    break_record=lambda record: replace(
        record, capabilities=record.capabilities - {Capability.COLLECTIVE_REFIT, Capability.IPC_REFIT}
    ),
)
@around(
    GenerationEngine.init_collective,
    GenerationEngine.update_weights_from_collective,
    GenerationEngine.update_weights_from_ipc_handles,
)
def _undeclared_ignored(*_: Any, **__: Any) -> bool:
    return True
