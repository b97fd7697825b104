"""Mutants of the phases of an update, of the receiving side of transports, and of undeclared calls.

Parts of versions are used, errors are ignored, and spans are wrong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from rlframework.base.errors import EngineNotReady, RefitError
from rlframework.interfaces.generation import GenerationEngine, GenerationRequest, GenerationResult
from rlframework.plugins.types import Capability
from rlframework.weight_sync.buffers import checksum
from rlframework.weight_sync.ipc import open_memory
from rlframework_conformance.mutants.generation_engine.changes import (
    around_observed,
    broken_results,
    model_of,
    saved_weights,
)
from rlframework_conformance.mutants.mutant import around, mutant

_EMBEDDED = frozenset({Capability.EMBEDDED_GENERATION})
_IN_FLIGHT = frozenset({Capability.IN_FLIGHT_UPDATE})
_PHASES = (GenerationEngine.begin_weight_update, GenerationEngine.load_weights, GenerationEngine.finish_weight_update)


@mutant("begins_with_saved_weights", "Without weights, those in the model's directory are used.")
@around_observed(GenerationEngine.poll)
def _begins_with_saved_weights(poll: Any, engine: Any, timeout: float | None = 0.0) -> Any:
    try:
        return poll(timeout)
    except EngineNotReady:
        _update(engine, 0, saved_weights(engine.directory))
        return poll(timeout)


@mutant("committed_on_arrival", "An update is committed when its last weight arrives.")
@around(GenerationEngine.load_weights, GenerationEngine.finish_weight_update)
def _committed_on_arrival(call: Any, engine: Any, *weights: Any) -> Any:
    if weights:
        call(*weights)
        engine.report = super(type(engine), engine).finish_weight_update()
    return engine.report


@mutant("earlier_weights_meanwhile", "Until an update is finished, requests get the earlier weights.")
@around(*_PHASES)
def _earlier_weights_meanwhile(call: Any, engine: Any, *arguments: Any) -> Any:
    if call.__name__ == "begin_weight_update":
        engine.begun, engine.buffered = arguments, {}
        return None
    if call.__name__ == "load_weights":
        engine.buffered |= {name: tensor.clone() for name, tensor in arguments[0]}
        return None
    super(type(engine), engine).begin_weight_update(*engine.begun)
    super(type(engine), engine).load_weights(engine.buffered.items())
    return call()


@mutant("arrivals_of_two_updates", "What has arrived of a discarded update is part of the next one.")
@around_observed(GenerationEngine.begin_weight_update, GenerationEngine.finish_weight_update)
def _arrivals_of_two_updates(call: Any, engine: Any, *announced: Any) -> Any:
    if announced:
        engine.kept = engine.arrived
    else:
        engine.load_weights([(name, engine.kept[name]) for name in engine.kept.keys() - engine.arrived.keys()])
    return call(*announced)


@mutant("missing_from_disk", "Weights that do not arrive are read from the model's directory.")
@around_observed(GenerationEngine.finish_weight_update)
def _missing_from_disk(finish: Any, engine: Any) -> Any:
    engine.load_weights(_not_arrived(engine))
    return finish()


@mutant("other_weights_skipped", "Weights other than announced are skipped.")
@around_observed(GenerationEngine.load_weights)
def _other_weights_skipped(load: Any, engine: Any, weights: Any) -> None:
    load([(name, one) for name, one in weights if engine.specs.get(name) == (tuple(one.shape), one.dtype)])


@mutant("unfit_weights_skipped", "Weights that the model does not have are skipped.")
@around_observed(GenerationEngine.begin_weight_update, GenerationEngine.load_weights)
def _unfit_weights_skipped(call: Any, engine: Any, *arguments: Any) -> None:
    *version, weights = arguments
    weights = weights.items() if version else weights
    fits = ((name, one) for name, one in weights if name in saved_weights(engine.directory))
    call(*version, dict(fits) if version else fits)


@mutant("failed_sender_ignored", "An update whose sender fails is completed with the earlier weights.")
@around_observed(GenerationEngine.load_weights)
def _failed_sender_ignored(load: Any, engine: Any, weights: Any) -> None:
    def or_earlier() -> Iterator[tuple[str, Tensor]]:
        try:
            yield from weights
        except RuntimeError as error:
            engine.failure = error
            yield from _not_arrived(engine)

    load(or_earlier())
    if hasattr(engine, "failure"):
        engine.finish_weight_update()
        raise engine.failure


@mutant("earlier_weights_after_failure", "After an update that failed, the earlier weights are used.")
@around_observed(GenerationEngine.load_weights, GenerationEngine.finish_weight_update)
def _earlier_weights_after_failure(call: Any, engine: Any, *weights: Any) -> Any:
    try:
        return call(*weights)
    except (RefitError, RuntimeError):
        _update(engine, 10, saved_weights(engine.directory))
        raise


@mutant("spans_of_the_last_version", "All tokens have the version that a request ended with.", needs=_IN_FLIGHT)
@broken_results
def _spans_of_the_last_version(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    return {"spans": (result.spans[-1]._replace(start=0),)}


@mutant(
    "updated_while_decoding",
    "Weights change while a token is computed: the first of a version is still of the earlier one.",
    needs=_IN_FLIGHT,
)
@broken_results
def _updated_while_decoding(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    if len(result.spans) != 2:
        return {}
    first, second = result.spans
    return {"spans": (first._replace(end=first.end - 1), second._replace(start=second.start - 1))}


@mutant("update_aborts", "An update aborts the requests in progress.", needs=_IN_FLIGHT)
@around_observed(GenerationEngine.begin_weight_update, GenerationEngine.attach)
def _update_aborts(call: Any, engine: Any, *arguments: Any) -> None:
    engine.abort(engine.asked.keys())
    call(*arguments)


def _not_arrived(engine: Any) -> list[tuple[str, Tensor]]:
    """Return the announced weights that have not arrived, as they are in the model's directory."""
    saved = saved_weights(engine.directory)
    return [(name, saved[name]) for name in engine.specs if name not in engine.arrived]


def _update(engine: Any, version: int, weights: Mapping[str, Tensor]) -> None:
    """Give `engine` whole weights."""
    engine.begin_weight_update(version, {name: (tuple(one.shape), one.dtype) for name, one in weights.items()})
    engine.load_weights(weights.items())
    engine.finish_weight_update()


_SAME_SHAPE = "model.layers.0.mlp.up_proj.weight", "model.layers.1.mlp.up_proj.weight"


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
