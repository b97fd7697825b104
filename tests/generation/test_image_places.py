"""The places of images in prompts, of a Qwen2-VL that makes a feature of four patches."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from rlframework.base.errors import RequestError
from rlframework.generation.media import image_places
from rlframework.interfaces.generation import GenerationRequest

IMAGE = 9
CONFIG = SimpleNamespace(
    model_type="qwen2_vl", image_token_id=IMAGE, vision_config=SimpleNamespace(spatial_merge_size=2)
)


def request(ids: list[int], *grids: tuple[int, int]) -> GenerationRequest:
    media = {}
    if grids:
        media["image_grid_thw"] = torch.tensor([[1, *grid] for grid in grids])
        media["pixel_values"] = torch.arange(4.0 * sum(high * wide for high, wide in grids)).view(-1, 4)
    return GenerationRequest("r", torch.tensor(ids), 0, 1, media=media)


def test_each_image_has_its_tokens_and_its_own_tensors():
    first, second = image_places(request([1, IMAGE, 2, IMAGE, IMAGE, 3], (2, 2), (2, 4)), CONFIG)
    assert (first.start, first.tokens, second.start, second.tokens) == (1, 1, 3, 2)
    assert second.media.inputs["image_grid_thw"].tolist() == [[1, 2, 4]]
    assert second.media.inputs["pixel_values"].flatten().tolist() == [float(number) for number in range(16, 48)]
    assert image_places(request([1, 2]), CONFIG) == []


@pytest.mark.parametrize(
    ("ids", "grids", "message"),
    [
        ([1, IMAGE, 2], [], "1 image tokens, but the model makes 0 features"),
        ([1, IMAGE, 2], [(2, 4)], "1 image tokens, but the model makes 2 features"),
        ([1, IMAGE, IMAGE, IMAGE], [(2, 4)], "3 image tokens, but the model makes 2 features"),
        ([IMAGE, 1, IMAGE], [(2, 4)], "other tokens among those of an image"),
    ],
)
def test_tokens_that_do_not_fit_the_images_are_rejected(ids, grids, message):
    with pytest.raises(RequestError, match=message):
        image_places(request(ids, *grids), CONFIG)


def test_images_whose_features_cannot_be_counted_are_rejected():
    unknown = SimpleNamespace(model_type="other", image_token_id=IMAGE)
    sound = GenerationRequest("r", torch.tensor([IMAGE]), 0, 1, media={"sound": torch.zeros(2)})
    with pytest.raises(RequestError, match="media sound, of which the number of features of a other model"):
        image_places(sound, unknown)
