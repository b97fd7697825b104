"""Mutants that use the wrong weights, or what was computed with them, or change the state of the module."""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from rlframework.generation.engine_model import cache_argument
from rlframework.interfaces.generation import GenerationRequest, GenerationResult
from rlframework.plugins.types import Capability
from rlframework_conformance.mutants.generation_engine.changes import (
    broken_model,
    broken_poll,
    broken_results,
    broken_weights,
    observed,
    saved_weights,
)
from rlframework_conformance.mutants.mutant import mutant

_LIVE = "test_attached_weights_are_live"
_LAST_GIVEN = "test_weights_given_last_count_however_they_came"
_LAST_UPDATE = "test_the_weights_of_the_last_update_count"
_EVERY = "test_every_tensor_of_an_update_arrives"
_ONE_BY_ONE = "test_weights_may_come_one_by_one_and_be_reused_by_the_sender"
_OLDER = "test_nothing_computed_with_older_weights_is_used"
_ADAPTERS = "test_adapters_are_added_to_the_weights_of_the_model"
_EMBEDDED = frozenset({Capability.EMBEDDED_GENERATION})
_ONE, _OTHER = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
_SQUARE = "model.layers.0.self_attn.q_proj.weight"


# -- weights that do not arrive as they were sent ----------------------------------------------------------------------


@mutant("tensor_missing", "One tensor is not updated.", _EVERY)
@broken_weights
def _tensor_missing(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    last = max(weights)
    return weights if engine.earlier is None else {**weights, last: engine.earlier[last]}


@mutant("tensors_reordered", "Two tensors of the same shape are exchanged.", _EVERY, _LAST_UPDATE)
@broken_weights
def _tensors_reordered(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return {**weights, _ONE: weights[_OTHER], _OTHER: weights[_ONE]} if {_ONE, _OTHER} <= weights.keys() else weights


@mutant("tensor_transposed", "A square matrix is transposed.", _EVERY, _LAST_UPDATE)
@broken_weights
def _tensor_transposed(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return {**weights, _SQUARE: weights[_SQUARE].T.contiguous()} if _SQUARE in weights else weights


@mutant("weights_rounded", "Weights are rounded to bfloat16 on their way.", _EVERY, _LAST_UPDATE)
@broken_weights
def _weights_rounded(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: tensor.bfloat16().to(tensor.dtype) for name, tensor in weights.items()}


@mutant(
    "stale_after_update", "Updates after the first report their version, but change no weight.", _LAST_UPDATE, _EVERY
)
@broken_weights
def _stale_after_update(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return weights if engine.earlier is None else {name: engine.earlier[name] for name in weights}


@mutant("adapters_undelivered", "Adapters are counted as received, but not added to the weights.", _ADAPTERS)
@broken_weights
def _adapters_undelivered(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: torch.zeros_like(tensor) if "lora_B" in name else tensor for name, tensor in weights.items()}


@mutant(
    "files_instead",
    "An update loads the weights of the model's directory instead of the given ones.",
    _LAST_UPDATE,
    _ONE_BY_ONE,
)
@broken_weights
def _files_instead(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    saved = saved_weights(engine.directory)
    return {name: saved.get(name, tensor) for name, tensor in weights.items()}


@mutant(
    "references_kept", "The engine keeps references to the sender's tensors, which the sender overwrites.", _ONE_BY_ONE
)
def _references_kept(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def load_weights(self, weights: Any) -> None:
            super().load_weights(dict(weights).items())

    return Broken


# -- a model that is not the trainer's ---------------------------------------------------------------------------------


@mutant("tied_head_stale", "The head that is tied to the embeddings keeps their first values.", _EVERY, needs=_EMBEDDED)
@broken_model
def _tied_head_stale(engine: Any, module: Any) -> None:
    if module.config.tie_word_embeddings:
        engine.first_head = getattr(engine, "first_head", module.lm_head.weight.detach().clone())
        module.lm_head.weight = torch.nn.Parameter(engine.first_head)


@mutant(
    "buffer_lost",
    "A buffer that is not saved, of the rotary embeddings, is lost when the memory of weights is released.",
    "test_memory_can_be_released_between_rollouts",
    needs=_EMBEDDED,
)
def _buffer_lost(part: Any) -> type:
    class Broken(broken_model(_without_buffer)(part)):  # type: ignore[misc]
        released = False

        def release(self, tags: Collection[Any] = ("weights", "kv_cache")) -> int:
            self.released = "weights" in tags
            return int(super().release(tags))

    return Broken


def _without_buffer(engine: Any, module: Any) -> None:
    if engine.released:
        module.model.rotary_emb.inv_freq.zero_()


@mutant("cache_released_with_weights", "Releasing the memory of caches also changes weights.",
        "test_memory_can_be_released_between_rollouts", needs=_EMBEDDED)  # fmt: skip
def _weights_released(part: Any) -> type:
    class Broken(observed(part)):  # type: ignore[misc]
        def release(self, tags: Collection[Any] = ("weights", "kv_cache")) -> int:
            with torch.no_grad():
                self.given_module.model.norm.weight.zero_()
            return int(super().release(tags))

    return Broken


@mutant("first_module_kept", "Attaching another module has no effect.", _OLDER, needs=_EMBEDDED)
def _first_module_kept(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        kept: Any = None

        def attach(self, model: Any, version: int) -> None:
            self.kept = self.kept or model
            super().attach(self.kept, version)

    return Broken


@mutant(
    "loaded_weights_kept", "Attaching a module has no effect after weights were loaded.", _LAST_GIVEN, needs=_EMBEDDED
)
def _loaded_weights_kept(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        loaded = False

        def load_weights(self, weights: Any) -> None:
            super().load_weights(weights)
            self.loaded = True

        def attach(self, model: Any, version: int) -> None:
            if not self.loaded:
                super().attach(model, version)

    return Broken


@mutant("copied_at_attach", "The module is copied when it is attached for the first time.", _LIVE, needs=_EMBEDDED)
def _copied_at_attach(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        copies: Any = None

        def attach(self, model: Any, version: int) -> None:
            self.copies = self.copies or {id(model): copy.deepcopy(model)}
            super().attach(self.copies.get(id(model), model), version)

    return Broken


@mutant(
    "left_in_evaluation",
    "Generation leaves the module in evaluation mode, so training continues without dropout.",
    "test_generating_leaves_the_module_as_it_was",
    needs=_EMBEDDED,
)
@broken_poll
def _left_in_evaluation(engine: Any, sound: Any, timeout: float | None) -> list[GenerationResult]:
    results: list[GenerationResult] = sound(timeout)
    engine.given_module.eval()
    return results


# -- caches of older weights -------------------------------------------------------------------------------------------


@mutant("stale_prefix_cache", "Keys and values of prompts that were computed with the first weights are used again.",
        _OLDER, needs=_EMBEDDED)  # fmt: skip
def _stale_prefix_cache(part: Any) -> type:
    class Broken(broken_results(_with_first_keys_and_values)(part)):  # type: ignore[misc]
        first_module: Any = None

        def attach(self, model: Any, version: int) -> None:
            super().attach(model, version)
            self.first_module = self.first_module or copy.deepcopy(model).eval()

    return Broken


@torch.no_grad()
def _with_first_keys_and_values(engine: Any, request: GenerationRequest, result: GenerationResult) -> Mapping[str, Any]:
    """Complete the prompt greedily, with the keys and values of the first module."""
    prompt, module = request.prompt_ids[None], copy.deepcopy(engine.given_module).eval()
    name = cache_argument(module)
    cache = getattr(engine.first_module(input_ids=prompt[:, :-1], use_cache=True), name)
    tokens, logprobs, last = [], [], prompt[:, -1:]
    for _ in range(len(result.token_ids)):
        logits = module(input_ids=last, use_cache=True, **{name: cache}).logits[0, -1]
        last = logits.argmax().view(1, 1)
        tokens.append(int(last))
        logprobs.append(float(torch.log_softmax(logits, -1)[tokens[-1]]))
    return {"token_ids": torch.tensor(tokens), "logprobs": torch.tensor(logprobs)}


@mutant("stale_encoder_cache", "Input embeddings, as those of an encoder, are cached and used after an update.",
        _OLDER, needs=_EMBEDDED)  # fmt: skip
def _stale_encoder_cache(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        first: Tensor | None = None

        def attach(self, model: Any, version: int) -> None:
            encoded = copy.deepcopy(model)
            embeddings = encoded.get_input_embeddings()
            self.first = embeddings.weight.detach().clone() if self.first is None else self.first
            embeddings.weight = torch.nn.Parameter(self.first)
            super().attach(encoded, version)

    return Broken
