"""Helpers that break a generation engine by changing what goes into its public methods or comes out of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlframework.interfaces.generation import GenerationEngine, GenerationRequest, GenerationResult
from rlframework_conformance import cases
from rlframework_conformance.mutants.mutant import around, together
from rlframework_conformance.policies import read_weights

Break = Callable[[Any], Any]


def observed(part: Any) -> Any:
    """Return a subclass of `part` that keeps what it received.

    `settings` and `directory`; `asked`, the requests by id, of which the last call had `beside`; `given_module`;
    `specs` and `arrived`, the announced and the received weights of the last update.
    """

    class Observed(part):  # type: ignore[misc]
        given_module: Any = None
        beside = 0

        def __init__(self, config: Any, tokenizer: Any, **location: Any) -> None:
            super().__init__(config, tokenizer, **location)
            self.settings, self.directory = config, location["model_name"]
            self.asked: dict[str, GenerationRequest] = {}
            self.specs: Mapping[str, tuple[tuple[int, ...], torch.dtype]] = {}
            self.arrived: dict[str, Tensor | None] = {}

        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            super().submit(requests)
            self.asked |= {request.request_id: request for request in requests}
            self.beside = len(requests)

        def attach(self, model: Any, version: int) -> None:
            super().attach(model, version)
            self.given_module = model

        def begin_weight_update(self, version: int, specs: Any) -> None:
            super().begin_weight_update(version, specs)
            self.specs, self.arrived = specs, {}

        def load_weights(self, weights: Any) -> None:
            super().load_weights(self._noted(weights))

        def _noted(self, weights: Any) -> Iterator[tuple[str, Tensor]]:
            for name, tensor in weights:
                self.arrived[name] = tensor.clone()
                yield name, tensor

        def update_weights_from_ipc_handles(self, ipc_handles: Mapping[str, Any]) -> bool:
            self.arrived |= {slot.name: None for group in ipc_handles.values() for slot in group.slots}
            return bool(super().update_weights_from_ipc_handles(ipc_handles))

    return Observed


def around_observed(*methods: Callable[..., Any]) -> Callable[[Callable[..., Any]], Break]:
    """Decorate a change as `around` does, of an engine that keeps what it received; see `observed`."""
    return lambda change: together(observed, around(*methods)(change))


def broken_requests(change: Callable[[Any, GenerationRequest], Mapping[str, Any]]) -> Break:
    """Break requests: the fields of each are replaced by those of `change(engine, request)`."""

    @around_observed(GenerationEngine.submit)
    def submit(sound: Any, engine: Any, requests: Sequence[GenerationRequest]) -> None:
        sound([dataclasses.replace(request, **change(engine, request)) for request in requests])

    return submit


def broken_sampling(change: Callable[[Any, GenerationRequest], Mapping[str, Any]]) -> Break:
    """Break sampling: the fields of the `SamplingParams` of each request are replaced by `change(engine, request)`."""
    return broken_requests(
        lambda engine, request: {"sampling": dataclasses.replace(request.sampling, **change(engine, request))}
    )


def broken_results(change: Callable[[Any, GenerationRequest, GenerationResult], Mapping[str, Any]]) -> Break:
    """Break results: the fields of each are replaced by those of `change(engine, request, result)`."""

    @around_observed(GenerationEngine.poll)
    def poll(sound: Any, engine: Any, timeout: float | None = 0.0) -> list[GenerationResult]:
        return [
            dataclasses.replace(result, **change(engine, engine.asked[result.request_id], result))
            for result in sound(timeout)
        ]

    return poll


def broken_weights(change: Callable[[Any, dict[str, Tensor]], Mapping[str, Tensor]]) -> Break:
    """Break the weights on their way: `load_weights` gets `change(engine, weights)`.

    `engine.earlier` are the weights of the calls before, None at first.
    """

    @around_observed(GenerationEngine.load_weights)
    def load(sound: Any, engine: Any, weights: Any) -> None:
        received = {name: tensor.clone() for name, tensor in weights}
        engine.earlier = getattr(engine, "earlier", None)
        sound(change(engine, received).items())
        engine.earlier = {**(engine.earlier or {}), **received}

    return load


def broken_model(change: Callable[[Any, Any], None]) -> Break:
    """Break the model in use: after each update it is a separate module that `change(engine, module)` has changed."""

    @around_observed(GenerationEngine.finish_weight_update)
    def finish(sound: Any, engine: Any) -> Any:
        report, module = sound(), model_of(engine.directory, engine.arrived)
        change(engine, module)
        engine.attach(module, report.version)
        return report

    return finish


def broken_module(change: Callable[[Any], None]) -> Break:
    """Break the attached module: a copy is used, on which `change(module)` was called."""

    @around(GenerationEngine.attach)
    def attach(sound: Any, _: Any, model: Any, version: int) -> None:
        module = copy.deepcopy(model)
        change(module)
        sound(module, version)

    return attach


def model_of(directory: str, weights: Mapping[str, Tensor | None] | None = None) -> Any:
    """Return the model in `directory`, with `weights` by name; those that are None are the directory's."""
    module = cases.load(directory)
    weights = {name: weight for name, weight in (weights or {}).items() if weight is not None}
    module.load_state_dict(weights, strict=False)
    module.tie_weights()
    return module


def saved_weights(directory: str) -> dict[str, Tensor]:
    """Return the weights in the files of `directory`."""
    return read_weights(Path(directory))
