"""Helpers that break a generation engine by changing what goes into its public methods or comes out of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from rlframework.interfaces.generation import GenerationRequest, GenerationResult, WeightReport

Break = Callable[[Any], type]


def observed(part: Any) -> Any:
    """Return a subclass of `part` that keeps what it was given: `settings`, `directory`, `asked`, `given_module`."""

    class Observed(part):  # type: ignore[misc]
        given_module: Any = None

        def __init__(self, config: Any, tokenizer: Any, **place: Any) -> None:
            super().__init__(config, tokenizer, **place)
            self.settings, self.directory = config, place["model_name"]
            self.asked: dict[str, GenerationRequest] = {}

        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            super().submit(requests)
            self.asked |= {request.request_id: request for request in requests}

        def attach(self, model: Any, version: int) -> None:
            super().attach(model, version)
            self.given_module = model

    return Observed


def broken_settings(change: Callable[[Any], dict[str, Any]]) -> Break:
    """Break the settings: the configuration is updated with `change(config)`."""

    def break_it(part: Any) -> type:
        class Broken(part):  # type: ignore[misc]
            def __init__(self, config: Any, tokenizer: Any, **place: Any) -> None:
                super().__init__(config.model_copy(update=change(config)), tokenizer, **place)

        return Broken

    return break_it


def broken_requests(change: Callable[[Any, GenerationRequest], Mapping[str, Any]]) -> Break:
    """Break requests: the fields of each are replaced by those of `change(self, request)`."""

    def break_it(part: Any) -> type:
        class Broken(observed(part)):  # type: ignore[misc]
            def submit(self, requests: Sequence[GenerationRequest]) -> None:
                super().submit([dataclasses.replace(request, **change(self, request)) for request in requests])

        return Broken

    return break_it


def broken_sampling(change: Callable[[Any, GenerationRequest], Mapping[str, Any]]) -> Break:
    """Break sampling: the fields of the `SamplingParams` of each request are replaced by `change(self, request)`."""
    return broken_requests(
        lambda engine, request: {"sampling": dataclasses.replace(request.sampling, **change(engine, request))}
    )


def broken_results(change: Callable[[Any, GenerationRequest, GenerationResult], Mapping[str, Any]]) -> Break:
    """Break results: the fields of each are replaced by those of `change(self, request, result)`."""

    def poll(engine: Any, sound: Any, timeout: float | None) -> list[GenerationResult]:
        return [
            dataclasses.replace(result, **change(engine, engine.asked[result.request_id], result))
            for result in sound(timeout)
        ]

    return broken_poll(poll)


def broken_poll(change: Callable[..., list[GenerationResult]]) -> Break:
    """Break `poll`: it returns `change(self, sound, timeout)`."""

    def break_it(part: Any) -> type:
        class Broken(observed(part)):  # type: ignore[misc]
            def poll(self, timeout: float | None = 0.0) -> list[GenerationResult]:
                return change(self, super().poll, timeout)

        return Broken

    return break_it


def broken_weights(change: Callable[[Any, dict[str, Tensor]], Mapping[str, Tensor]]) -> Break:
    """Break the weights on their way: `load_weights` gets `change(self, weights)`; `self.earlier` are the previous."""

    def break_it(part: Any) -> type:
        class Broken(observed(part)):  # type: ignore[misc]
            earlier: Mapping[str, Tensor] | None = None

            def load_weights(self, weights: Any) -> None:
                given = {name: tensor.clone() for name, tensor in weights}
                super().load_weights(change(self, given).items())
                self.earlier = {**(self.earlier or {}), **given}

        return Broken

    return break_it


def broken_model(change: Callable[[Any, Any], None]) -> Break:
    """Break the model in use: after each update it is a separate module, on which `change(self, module)` was called."""

    def break_it(part: Any) -> type:
        class Broken(observed(part)):  # type: ignore[misc]
            arrived: Mapping[str, Tensor] = {}

            def load_weights(self, weights: Any) -> None:
                given = {name: tensor.clone() for name, tensor in weights}
                self.arrived = {**self.arrived, **given}
                super().load_weights(given.items())

            def finish_weight_update(self) -> WeightReport:
                report: WeightReport = super().finish_weight_update()
                module = model_of(self.directory, self.arrived)
                change(self, module)
                self.attach(module, report.version)
                return report

        return Broken

    return break_it


def broken_module(change: Callable[[Any], None]) -> Break:
    """Break the attached module: a copy is used, on which `change(module)` was called."""

    def break_it(part: Any) -> type:
        class Broken(part):  # type: ignore[misc]
            def attach(self, model: Any, version: int) -> None:
                module = copy.deepcopy(model)
                change(module)
                super().attach(module, version)

        return Broken

    return break_it


def model_of(directory: str, weights: Mapping[str, Tensor] | None = None) -> Any:
    """Return the model in `directory`, with `weights` by name."""
    from transformers import AutoModelForCausalLM

    from rlframework.huggingface.model_directories import quiet_transformers

    with quiet_transformers():
        module: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    module.load_state_dict(dict(weights or {}), strict=False)
    module.tie_weights()
    return module.eval()


def saved_weights(directory: str) -> dict[str, Tensor]:
    """Return the weights in the files of `directory`."""
    from safetensors.torch import load_file

    return load_file(f"{directory}/model.safetensors")
