"""Mutants of the phases of an update: parts of versions that are used, errors that are ignored, and wrong spans."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from rlframework.base.errors import EngineNotReady, RefitError
from rlframework.interfaces.generation import GenerationRequest, GenerationResult, WeightReport
from rlframework.plugins.types import Capability
from rlframework_conformance.mutants.generation_engine.changes import broken_results, observed, saved_weights
from rlframework_conformance.mutants.mutant import mutant

_WITHOUT = "test_nothing_is_served_without_weights"
_PART = "test_a_part_of_an_update_is_not_used"
_AGAIN = "test_an_update_can_be_begun_again"
_MISSING = "test_weights_that_do_not_arrive_are_named"
_OTHER = "test_weights_other_than_announced_are_rejected_by_name"
_UNFIT = "test_weights_that_do_not_fit_the_model_are_rejected_by_name"
_FAILS = "test_an_update_that_fails_leaves_the_engine_without_weights"
_HALF = "test_half_of_a_transfer_is_not_used"
_IN_PROGRESS = "test_requests_in_progress_survive_an_update"
_STEP = "test_requests_in_progress_survive_a_step_of_the_trainer"
_EMBEDDED = frozenset({Capability.EMBEDDED_GENERATION})
_IN_FLIGHT = frozenset({Capability.IN_FLIGHT_UPDATE})
_Specs = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@mutant("begins_with_saved_weights", "Without weights, those in the model's directory are used.", _WITHOUT)
def _begins_with_saved_weights(part: Any) -> type:
    class Broken(observed(part)):  # type: ignore[misc]
        def poll(self, timeout: float | None = 0.0) -> list[GenerationResult]:
            try:
                return list(super().poll(timeout))
            except EngineNotReady:
                _update(super(), 0, saved_weights(self.directory))
                return list(super().poll(timeout))

    return Broken


@mutant("committed_on_arrival", "An update is committed when its last weight arrives.", _PART)
def _committed_on_arrival(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def load_weights(self, weights: Any) -> None:
            super().load_weights(weights)
            self.report = super().finish_weight_update()

        def finish_weight_update(self) -> WeightReport:
            report: WeightReport = self.report
            return report

    return Broken


@mutant("earlier_weights_meanwhile", "Until an update is finished, requests get the earlier weights.", _PART, _FAILS)
def _earlier_weights_meanwhile(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def begin_weight_update(self, version: int, specs: _Specs) -> None:
            self.begun = version, specs
            self.held: dict[str, Tensor] = {}

        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                self.held[name] = tensor.clone()

        def finish_weight_update(self) -> WeightReport:
            super().begin_weight_update(*self.begun)
            super().load_weights(self.held.items())
            report: WeightReport = super().finish_weight_update()
            return report

    return Broken


@mutant("arrivals_of_two_updates", "What has arrived of a discarded update is part of the next one.", _AGAIN)
def _arrivals_of_two_updates(part: Any) -> type:
    class Broken(_remembering(part)):  # type: ignore[misc]
        def begin_weight_update(self, version: int, specs: _Specs) -> None:
            kept = dict(getattr(self, "arrived", {}))
            super().begin_weight_update(version, specs)
            self.kept = kept

        def finish_weight_update(self) -> WeightReport:
            rest = {name: tensor for name, tensor in self.kept.items() if name not in self.arrived}
            super().load_weights(rest.items())
            report: WeightReport = super().finish_weight_update()
            return report

    return Broken


@mutant("missing_from_disk", "Weights that do not arrive are read from the model's directory.", _MISSING, _HALF)
def _missing_from_disk(part: Any) -> type:
    class Broken(_remembering(part)):  # type: ignore[misc]
        def finish_weight_update(self) -> WeightReport:
            saved = saved_weights(self.directory)
            super().load_weights([(name, saved[name]) for name in self.specs if name not in self.arrived])
            report: WeightReport = super().finish_weight_update()
            return report

    return Broken


@mutant("other_weights_skipped", "Weights other than announced are skipped.", _OTHER)
def _other_weights_skipped(part: Any) -> type:
    class Broken(_remembering(part)):  # type: ignore[misc]
        def load_weights(self, weights: Any) -> None:
            fits = [(name, one) for name, one in weights if self.specs.get(name) == (tuple(one.shape), one.dtype)]
            super().load_weights(fits)

    return Broken


@mutant("unfit_weights_skipped", "Weights that the model does not have are skipped.", _UNFIT)
def _unfit_weights_skipped(part: Any) -> type:
    class Broken(observed(part)):  # type: ignore[misc]
        def begin_weight_update(self, version: int, specs: _Specs) -> None:
            self.known = saved_weights(self.directory)
            super().begin_weight_update(version, {name: spec for name, spec in specs.items() if name in self.known})

        def load_weights(self, weights: Any) -> None:
            super().load_weights((name, tensor) for name, tensor in weights if name in self.known)

    return Broken


@mutant("failed_sender_ignored", "An update whose sender fails is completed with the earlier weights.", _FAILS)
def _failed_sender_ignored(part: Any) -> type:
    class Broken(_remembering(part)):  # type: ignore[misc]
        def load_weights(self, weights: Any) -> None:
            failure: list[Exception] = []

            def until_failure() -> Iterator[tuple[str, Tensor]]:
                try:
                    yield from weights
                except RuntimeError as error:
                    failure.append(error)

            super().load_weights(until_failure())
            if failure:
                saved = saved_weights(self.directory)
                super().load_weights([(name, saved[name]) for name in self.specs if name not in self.arrived])
                super().finish_weight_update()
                raise failure[0]

    return Broken


@mutant("earlier_weights_after_failure", "After an update that failed, the earlier weights are used.", _FAILS, _MISSING)
def _earlier_weights_after_failure(part: Any) -> type:
    class Broken(observed(part)):  # type: ignore[misc]
        def load_weights(self, weights: Any) -> None:
            with_earlier = self._or_earlier
            with_earlier(lambda: super(Broken, self).load_weights(weights))

        def finish_weight_update(self) -> WeightReport:
            report: WeightReport = self._or_earlier(super().finish_weight_update)
            return report

        def _or_earlier(self, call: Any) -> Any:
            try:
                return call()
            except (RefitError, RuntimeError):
                _update(super(), 10, saved_weights(self.directory))
                raise

    return Broken


@mutant(
    "spans_of_the_last_version",
    "All tokens have the version that a request ended with.",
    _IN_PROGRESS,
    _STEP,
    needs=_IN_FLIGHT,
)
@broken_results
def _spans_of_the_last_version(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    return {"spans": (result.spans[-1]._replace(start=0),)}


@mutant(
    "updated_while_decoding",
    "Weights change while a token is computed: the first of a version is still of the earlier one.",
    _IN_PROGRESS,
    _STEP,
    needs=_IN_FLIGHT,
)
@broken_results
def _updated_while_decoding(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    if len(result.spans) != 2:
        return {}
    first, second = result.spans
    return {"spans": (first._replace(end=first.end - 1), second._replace(start=second.start - 1))}


@mutant("update_aborts", "An update aborts the requests in progress.", _IN_PROGRESS, _STEP, needs=_IN_FLIGHT)
def _update_aborts(part: Any) -> type:
    class Broken(observed(part)):  # type: ignore[misc]
        def begin_weight_update(self, version: int, specs: _Specs) -> None:
            super().abort(self.asked.keys())
            super().begin_weight_update(version, specs)

        def attach(self, model: Any, version: int) -> None:
            super().abort(self.asked.keys())
            super().attach(model, version)

    return Broken


def _remembering(part: Any) -> Any:
    """Return a subclass of `part` that keeps what is announced and what arrives: `specs`, `arrived`."""

    class Remembering(observed(part)):  # type: ignore[misc]
        def begin_weight_update(self, version: int, specs: _Specs) -> None:
            super().begin_weight_update(version, specs)
            self.specs = specs
            self.arrived: dict[str, Tensor | None] = {}

        def load_weights(self, weights: Any) -> None:
            super().load_weights(self._noted(weights))

        def _noted(self, weights: Any) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                self.arrived[name] = tensor.clone()
                yield name, tensor

        def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, Any]) -> bool:
            self.arrived |= {slot.name: None for group in ipc_handles.values() for slot in group.slots}
            return bool(super().update_weights_from_ipc_handles(ipc_handles))

    return Remembering


def _update(engine: Any, version: int, weights: Mapping[str, Tensor]) -> None:
    """Give `engine` whole weights."""
    engine.begin_weight_update(version, {name: (tuple(one.shape), one.dtype) for name, one in weights.items()})
    engine.load_weights(weights.items())
    engine.finish_weight_update()
