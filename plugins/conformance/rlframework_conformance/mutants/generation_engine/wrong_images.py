"""Images of other rows, and image encoders of earlier weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

from torch import Tensor

from rlframework.interfaces.generation import GenerationEngine, GenerationRequest
from rlframework.plugins.types import Capability
from rlframework_conformance import cases
from rlframework_conformance.mutants.generation_engine.changes import around_observed, broken_weights
from rlframework_conformance.mutants.mutant import around, mutant


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
