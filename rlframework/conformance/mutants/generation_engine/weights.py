"""Mutants that sample with the wrong weights, or change the state of the module."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import Tensor

from rlframework.conformance.mutants.generation_engine.base import broken_generate, broken_weights
from rlframework.conformance.mutants.mutant import mutant
from rlframework.errors import NotSupported

_LIVE = "test_attached_weights_are_live"
_LAST_REFIT = "test_the_weights_of_the_last_refit_count"
_ONE_BY_ONE = "test_weights_may_come_one_by_one_and_be_reused_by_the_sender"
_CONTINUES = "test_generation_goes_on_after_it_was_finished"


def _saved(directory: str) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(f"{directory}/model.safetensors")


@mutant(
    "left_in_evaluation",
    "Generation leaves the module in evaluation mode, so training continues without dropout.",
    "test_generating_leaves_the_module_as_it_was",
)
@broken_generate
def _left_in_evaluation(engine: Any, sound: Any, data: Any, greedy: bool) -> Any:
    output = sound(data, greedy=greedy)
    engine.module.eval()
    return output


@mutant("copied_at_attach", "The attached module is copied, so training does not change the samples.", _LIVE)
def _copied_at_attach(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def attach(self, model: Any) -> None:
            super().attach(copy.deepcopy(model))

    return Broken


@mutant(
    "first_module_kept", "Attaching a second module has no effect.", "test_weights_given_last_count_however_they_came"
)
def _first_attached_kept(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        kept: Any = None

        def attach(self, model: Any) -> None:
            self.kept = self.kept or model
            super().attach(self.kept)

    return Broken


@mutant("stale_after_refit", "Only the first refit takes effect.", _LAST_REFIT, "test_every_tensor_of_a_refit_arrives")
@broken_weights
def _first_refit_only(engine: Any, sound: Any, weights: Any) -> None:
    if engine.loaded is None:
        engine.loaded = {name: tensor.clone() for name, tensor in weights}
        sound(engine.loaded.items())


@mutant("one_tensor_skipped", "One tensor is not updated by a refit.", "test_every_tensor_of_a_refit_arrives")
@broken_weights
def _one_skipped(engine: Any, sound: Any, weights: Any) -> None:
    given = {name: tensor.clone() for name, tensor in weights}
    last = max(given)
    if engine.loaded is not None:
        given[last] = engine.loaded[last]
    engine.loaded = given
    sound(given.items())


@mutant(
    "references_kept", "The engine keeps references to the sender's tensors, which the sender overwrites.", _ONE_BY_ONE
)
@broken_weights
def _references_kept(engine: Any, sound: Any, weights: Any) -> None:
    sound(dict(weights).items())


@mutant(
    "missing_from_disk",
    "Weights missing from a refit are read from the model directory.",
    "test_missing_weights_are_refused_by_name",
)
@broken_weights
def _missing_from_disk(engine: Any, sound: Any, weights: Any) -> None:
    sound({**_saved(engine.model_name), **dict(weights)}.items())


@mutant(
    "given_weights_ignored",
    "A refit loads the weights in the model directory instead of the given ones.",
    "test_loaded_weights_are_sampled_with",
    _LAST_REFIT,
)
@broken_weights
def _given_ignored(engine: Any, sound: Any, weights: Any) -> None:
    for _ in weights:
        pass
    sound(_saved(engine.model_name).items())


@mutant(
    "begins_with_saved_weights",
    "Without weights, the engine silently loads those in the model directory.",
    "test_generating_without_weights_is_refused",
)
def _starts_with_saved(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        given = False

        def __init__(self, config: Any, tokenizer: Any, **place: Any) -> None:
            super().__init__(config, tokenizer, **place)
            self.saved = place["model_name"]

        def attach(self, model: Any) -> None:
            self.given = True
            super().attach(model)

        def generate(self, data: Any, greedy: bool = False) -> Any:
            if not self.given:
                self.load_weights(_saved(self.saved).items())
            return super().generate(data, greedy)

    return Broken


@mutant("finish_says_nothing", "`finish_generation` returns None, which reads as not ready.", _CONTINUES)
def _finish_returns_none(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def finish_generation(self, *args: Any, **kwargs: Any) -> None:
            super().finish_generation(*args, **kwargs)

    return Broken


@mutant(
    "refit_pretended",
    "An unsupported refit over a process group does nothing and reports success.",
    "test_refit_that_is_not_declared_is_refused",
    break_record=lambda record: replace(record, capabilities=frozenset()),
)
def _refit_ignored(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def init_collective(self, *_: Any, **__: Any) -> None:
            raise NotSupported("this engine does not receive weights")

        prepare_refit_info = update_weights_from_ipc_handles = init_collective

        def update_weights_from_collective(self) -> bool:
            return True

    return Broken
