"""Prompts with images: each is completed with its own, by the image encoder of the weights received last."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rlframework.interfaces.generation import GenerationRequest, GenerationResult, SamplingParams
from rlframework.plugins.types import Capability
from rlframework_conformance import cases
from rlframework_conformance.rules import Suite, holds
from rlframework_conformance.suites.generation.engine_harness import GenerationHarness

_GRIDS: Sequence[Sequence[tuple[int, int]]] = (((4, 4),), ((4, 4),), ((2, 4), (4, 6)), ())
"""Height and width, in patches, of the images of each prompt. The first two prompts have equal tokens."""


class Images(Suite):
    """Two prompts that differ in their images alone, one with two images, and one without any."""

    @holds(9, Capability.MULTIMODAL)
    def test_prompts_are_completed_with_their_own_images(self, harness: GenerationHarness) -> None:
        """Log-probabilities must be those of plain forwards, each with its own images."""
        path = cases.model("patches_wide_heads", harness.models)
        engine, requests = harness.bare_engine(path=path), _requests()
        harness.update(engine, harness.weights(path), 1)
        engine.submit(requests)
        results, model = harness.collect(engine, requests), cases.load(path, "ImageTextToText")
        _require_logprobs(harness, "each with its images", requests, results, model)

    @holds(10, Capability.MULTIMODAL)
    def test_an_update_covers_the_image_encoder(self, harness: GenerationHarness) -> None:
        """The same after an update that changes the image encoder alone, for images that were seen before it."""
        path = cases.model("patches_wide_heads", harness.models)
        engine, weights = harness.bare_engine(path=path), harness.weights(path)
        harness.update(engine, weights, 1)
        first = _requests()
        engine.submit(first)
        harness.collect(engine, first)
        changed = {name: 1.5 * one if "visual" in name else one for name, one in weights.items()}
        harness.update(engine, changed, 2)
        again, model = _requests(prefix="again"), cases.load(path, "ImageTextToText")
        with torch.no_grad():
            for name, weight in model.named_parameters():
                weight.mul_(1.5 if "visual" in name else 1.0)
        engine.submit(again)
        _require_logprobs(harness, "with another encoder", again, harness.collect(engine, again), model)


def _requests(prefix: str = "") -> list[GenerationRequest]:
    """Greedy requests; equal ones at each call."""
    generator = torch.Generator().manual_seed(0)
    found = []
    for row, grids in enumerate(_GRIDS):
        tokens = [token for height, width in grids for token in (*[cases.image_token()] * (height * width // 4), 9)]
        media: dict[str, Tensor] = {}
        if grids:
            patches = sum(height * width for height, width in grids)
            media["pixel_values"] = torch.randn(patches, 3 * 2 * 4 * 4, generator=generator)
            media["image_grid_thw"] = torch.tensor([[1, *grid] for grid in grids])
        prompt = torch.tensor([4, *tokens, 7, 3])
        found.append(GenerationRequest(f"{prefix}{row}", prompt, row, 4, SamplingParams(0.0), media=media))
    return found


@torch.no_grad()
def _require_logprobs(
    harness: GenerationHarness,
    what: str,
    requests: Sequence[GenerationRequest],
    results: Sequence[GenerationResult],
    model: Any,
) -> None:
    """Require the log-probabilities of a plain forward of each prompt with its completion and its images."""
    for row, (request, result) in enumerate(zip(requests, results, strict=True)):
        ids, start = torch.cat((request.prompt_ids, result.token_ids)), len(request.prompt_ids)
        types = {"mm_token_type_ids": (ids == cases.image_token()).int()[None]} if request.media else {}
        logits = model(input_ids=ids[None], **request.media, **types, use_cache=False).logits[0]
        every = logits[start - 1 : -1].double().log_softmax(-1)
        wanted = every.gather(1, result.token_ids[:, None])[:, 0]
        harness.values(f"log-probabilities of row {row} ({what})", result.logprobs, wanted)
