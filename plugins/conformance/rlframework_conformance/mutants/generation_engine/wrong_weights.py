"""Mutants that use the wrong weights, caches or images, or change the state of the module."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from rlframework.generation.engine_model import cache_argument
from rlframework.interfaces.generation import GenerationEngine, GenerationRequest, GenerationResult
from rlframework.plugins.types import Capability
from rlframework_conformance import cases
from rlframework_conformance.mutants.generation_engine.changes import (
    around_observed,
    broken_model,
    broken_results,
    broken_weights,
    saved_weights,
)
from rlframework_conformance.mutants.mutant import around, mutant, together

_EMBEDDED = frozenset({Capability.EMBEDDED_GENERATION})
_ONE, _OTHER = "model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.gate_proj.weight"
_SQUARE = "model.layers.0.self_attn.q_proj.weight"


# -- weights that do not arrive as they were sent ----------------------------------------------------------------------


@mutant("tensor_missing", "One tensor is not updated.")
@broken_weights
def _tensor_missing(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    last = max(weights)
    return weights if engine.earlier is None else {**weights, last: engine.earlier[last]}


@mutant("tensors_reordered", "Two tensors of the same shape are exchanged.")
@broken_weights
def _tensors_reordered(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return {**weights, _ONE: weights[_OTHER], _OTHER: weights[_ONE]} if {_ONE, _OTHER} <= weights.keys() else weights


@mutant("tensor_transposed", "A square matrix is transposed.")
@broken_weights
def _tensor_transposed(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return {**weights, _SQUARE: weights[_SQUARE].T.contiguous()} if _SQUARE in weights else weights


@mutant("weights_rounded", "Weights are rounded to bfloat16 on their way.")
@broken_weights
def _weights_rounded(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: tensor.bfloat16().to(tensor.dtype) for name, tensor in weights.items()}


@mutant("stale_after_update", "Updates after the first report their version, but change no weight.")
@broken_weights
def _stale_after_update(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return weights if engine.earlier is None else {name: engine.earlier[name] for name in weights}


@mutant("adapters_undelivered", "Adapters are counted as received, but not added to the weights.")
@broken_weights
def _adapters_undelivered(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: torch.zeros_like(tensor) if "lora_B" in name else tensor for name, tensor in weights.items()}


@mutant("files_instead", "An update loads the weights of the model's directory instead of the given ones.")
@broken_weights
def _files_instead(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    saved = saved_weights(engine.directory)
    return {name: saved.get(name, tensor) for name, tensor in weights.items()}


@mutant("references_kept", "The engine keeps references to the sender's tensors, which the sender overwrites.")
@around(GenerationEngine.load_weights)
def _references_kept(load: Any, _: Any, weights: Any) -> None:
    load(dict(weights).items())


# -- a model that is not the trainer's ---------------------------------------------------------------------------------


@mutant("tied_head_stale", "The head that is tied to the embeddings keeps their first values.", needs=_EMBEDDED)
@broken_model
def _tied_head_stale(engine: Any, module: Any) -> None:
    if module.config.tie_word_embeddings:
        engine.first_head = getattr(engine, "first_head", module.lm_head.weight.detach().clone())
        module.lm_head.weight = torch.nn.Parameter(engine.first_head)


@broken_model
def _buffer_zero_once_released(engine: Any, module: Any) -> None:
    if getattr(engine, "released", False):
        module.model.rotary_emb.inv_freq.zero_()


@around(GenerationEngine.release)
def _notes_release(release: Any, engine: Any, tags: Collection[Any] = ("weights", "kv_cache")) -> Any:
    engine.released = "weights" in tags
    return release(tags)


_buffer_lost = mutant(
    "buffer_lost",
    "A buffer that is not saved, of the rotary embeddings, is lost when the memory of weights is released.",
    needs=_EMBEDDED,
)(together(_buffer_zero_once_released, _notes_release))


@mutant("cache_released_with_weights", "Releasing the memory of caches also changes weights.", needs=_EMBEDDED)
@around_observed(GenerationEngine.release)
def _weights_released(release: Any, engine: Any, *tags: Any) -> Any:
    with torch.no_grad():
        engine.given_module.model.norm.weight.zero_()
    return release(*tags)


@mutant("first_module_kept", "Attaching another module has no effect.", needs=_EMBEDDED)
@around(GenerationEngine.attach)
def _first_module_kept(attach: Any, engine: Any, model: Any, version: int) -> None:
    attach(vars(engine).setdefault("kept", model), version)


@mutant("loaded_weights_kept", "Attaching a module has no effect after weights were loaded.", needs=_EMBEDDED)
@around(GenerationEngine.load_weights, GenerationEngine.attach)
def _loaded_weights_kept(call: Any, engine: Any, *arguments: Any) -> None:
    if call.__name__ == "load_weights":
        engine.loaded = True
        call(*arguments)
    elif not hasattr(engine, "loaded"):
        call(*arguments)


@mutant("copied_at_attach", "The module is copied when it is attached for the first time.", needs=_EMBEDDED)
@around(GenerationEngine.attach)
def _copied_at_attach(attach: Any, engine: Any, model: Any, version: int) -> None:
    copies = vars(engine).setdefault("copies", {id(model): copy.deepcopy(model)})
    attach(copies.get(id(model), model), version)


@mutant(
    "left_in_evaluation",
    "Generation leaves the module in evaluation mode, so training continues without dropout.",
    needs=_EMBEDDED,
)
@around_observed(GenerationEngine.poll)
def _left_in_evaluation(poll: Any, engine: Any, timeout: float | None = 0.0) -> Any:
    results = poll(timeout)
    engine.given_module.eval()
    return results


# -- caches of older weights -------------------------------------------------------------------------------------------


@around(GenerationEngine.attach)
def _keeps_first_module(attach: Any, engine: Any, model: Any, version: int) -> None:
    attach(model, version)
    vars(engine).setdefault("first_module", copy.deepcopy(model).eval())


@broken_results
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


_stale_prefix_cache = mutant(
    "stale_prefix_cache",
    "Keys and values of prompts that were computed with the first weights are used again.",
    needs=_EMBEDDED,
)(together(_keeps_first_module, _with_first_keys_and_values))


@mutant(
    "stale_encoder_cache",
    "Input embeddings, as those of an encoder, are cached and used after an update.",
    needs=_EMBEDDED,
)
@around(GenerationEngine.attach)
def _stale_encoder_cache(attach: Any, engine: Any, model: Any, version: int) -> None:
    encoded = copy.deepcopy(model)
    embeddings = encoded.get_input_embeddings()
    embeddings.weight = vars(engine).setdefault("first_embeddings", embeddings.weight)
    attach(encoded, version)


@mutant("images_of_rows_swapped", "Two rows whose images have one size get each other's.")
@around(GenerationEngine.submit)
def _images_of_rows_swapped(submit: Any, _: Any, requests: Sequence[GenerationRequest]) -> None:
    media = [one.media for one in requests]
    if media[0]:
        media[:2] = media[1::-1]
    submit([dataclasses.replace(one, media=other) for one, other in zip(requests, media, strict=True)])


@mutant("images_by_prompt", "Prompts with equal tokens share what was computed of the first one's images.")
@around(GenerationEngine.submit)
def _images_by_prompt(submit: Any, _: Any, requests: Sequence[GenerationRequest]) -> None:
    first: dict[tuple[int, ...], Mapping[str, Any]] = {}
    for request in requests:
        first.setdefault(tuple(request.prompt_ids.tolist()), request.media)
    submit([dataclasses.replace(one, media=first[tuple(one.prompt_ids.tolist())]) for one in requests])


@mutant("vision_tower_not_refitted", "A refit does not update the image encoder.")
@broken_weights
def _vision_tower_not_refitted(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    earlier = engine.earlier or weights
    return {name: earlier[name] if "visual" in name else one for name, one in weights.items()}


@mutant(
    "encoder_cache_not_invalidated",
    "Features of images that were computed before an update are used after it.",
    needs=frozenset({Capability.EMBEDDED_GENERATION}),
)
@around_observed(GenerationEngine.finish_weight_update)
def _encoder_cache_not_invalidated(finish: Any, engine: Any) -> Any:
    report = finish()
    if any("visual" in name for name in engine.arrived):
        module, kept = _vision_model_of(engine.directory, engine.arrived), vars(engine).setdefault("kept", {})
        sound = module.base_model.get_image_features

        def get_image_features(pixel_values: Tensor, image_grid_thw: Tensor | None = None, **more: Any) -> Any:
            key = pixel_values.numpy().tobytes()
            if key not in kept:
                kept[key] = sound(pixel_values, image_grid_thw=image_grid_thw, **more)
            return kept[key]

        module.base_model.get_image_features = get_image_features
        engine.attach(module, report.version)
    return report


def _vision_model_of(directory: str, weights: Mapping[str, Tensor]) -> Any:
    """Return the model in `directory` with `weights`, named as in its files."""
    from safetensors.torch import save_file
    from transformers import AutoConfig

    with TemporaryDirectory() as folder:
        AutoConfig.from_pretrained(directory).save_pretrained(folder)
        save_file(dict(weights), f"{folder}/model.safetensors", {"format": "pt"})
        return cases.load(folder, "ImageTextToText")
