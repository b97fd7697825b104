"""Images of other rows, and image encoders of earlier weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from rlframework.interfaces.generation import GenerationRequest, WeightReport
from rlframework.plugins.types import Capability
from rlframework_conformance.mutants.generation_engine.changes import broken_weights, observed
from rlframework_conformance.mutants.mutant import mutant

_OWN = "test_prompts_are_completed_with_their_own_images"
_ENCODER = "test_an_update_covers_the_image_encoder"


@mutant("images_of_rows_swapped", "Two rows whose images have one size get each other's.", _OWN)
def _images_of_rows_swapped(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            if len(requests) > 1 and requests[0].media:
                first, second, *others = requests
                swapped = (first, second.media), (second, first.media)
                requests = [*(dataclasses.replace(one, media=media) for one, media in swapped), *others]
            super().submit(requests)

    return Broken


@mutant("images_by_prompt", "Prompts with equal tokens share what was computed of the first one's images.", _OWN)
def _images_by_prompt(part: Any) -> type:
    class Broken(part):  # type: ignore[misc]
        def submit(self, requests: Sequence[GenerationRequest]) -> None:
            first: dict[tuple[int, ...], Mapping[str, Any]] = {}
            for request in requests:
                first.setdefault(tuple(request.prompt_ids.tolist()), request.media)
            super().submit([dataclasses.replace(one, media=first[tuple(one.prompt_ids.tolist())]) for one in requests])

    return Broken


@mutant("vision_tower_not_refitted", "A refit does not update the image encoder.", _ENCODER)
@broken_weights
def _vision_tower_not_refitted(engine: Any, weights: dict[str, Tensor]) -> Mapping[str, Tensor]:
    earlier = engine.earlier or weights
    return {name: earlier[name] if "visual" in name else one for name, one in weights.items()}


@mutant(
    "encoder_cache_not_invalidated",
    "Features of images that were computed before an update are used after it.",
    _ENCODER,
    needs=frozenset({Capability.EMBEDDED_GENERATION}),
)
def _encoder_cache_not_invalidated(part: Any) -> type:
    class Broken(observed(part)):  # type: ignore[misc]
        def load_weights(self, weights: Any) -> None:
            self.arrived = {name: one.clone() for name, one in weights}
            super().load_weights(self.arrived.items())

        def finish_weight_update(self) -> WeightReport:
            report: WeightReport = super().finish_weight_update()
            if any("visual" in name for name in self.arrived):
                self.attach(self._with_kept_features(), report.version)
            return report

        def _with_kept_features(self) -> Any:
            """The model of the weights that have arrived, which computes the features of an image once for ever."""
            module = _vision_model_of(self.directory, self.arrived)
            sound, kept = module.base_model.get_image_features, self.__dict__.setdefault("kept", {})

            def get_image_features(pixel_values: Tensor, image_grid_thw: Tensor | None = None, **more: Any) -> Any:
                key = pixel_values.numpy().tobytes()
                if key not in kept:
                    kept[key] = sound(pixel_values, image_grid_thw=image_grid_thw, **more)
                return kept[key]

            module.base_model.get_image_features = get_image_features
            return module

    return Broken


def _vision_model_of(directory: str, weights: Mapping[str, Tensor]) -> Any:
    """Return the model in `directory` with `weights`, named as in its files."""
    from safetensors.torch import save_file
    from transformers import AutoConfig, AutoModelForImageTextToText

    from rlframework.huggingface.model_directories import quiet_transformers

    with TemporaryDirectory() as folder, quiet_transformers():
        AutoConfig.from_pretrained(directory).save_pretrained(folder)
        save_file(dict(weights), f"{folder}/model.safetensors", {"format": "pt"})
        module: Any = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return module.eval()
