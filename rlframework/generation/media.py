"""The images of generation requests, and their features, which are computed once for each different image."""

from __future__ import annotations

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from rlframework.base.errors import RequestError
from rlframework.huggingface.vision_models import count_features, image_token
from rlframework.interfaces.generation import GenerationRequest

_PICTURES = 4
"""Dimensions of the pixels of pictures of one size."""

_KEPT_BYTES = 1 << 28
"""Features that are kept for rows that begin later; those used least recently leave first."""


@dataclass(frozen=True, eq=False)
class Media:
    """The multimodal inputs of a prompt by their names in the model; equal content has an equal `key`."""

    inputs: Mapping[str, Tensor]
    key: str

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor]) -> Media:
        """Return the media `inputs`, on the CPU. Reads them once."""
        found = hashlib.blake2b(digest_size=16)
        for name in sorted(inputs):
            found.update(f"{name} {inputs[name].dtype} {tuple(inputs[name].shape)} ".encode())
            found.update(inputs[name].contiguous().view(torch.uint8).numpy().tobytes())
        return cls(inputs, found.hexdigest())

    @cached_property
    def each(self) -> Sequence[Media]:
        """The images one by one, where the inputs of each can be told apart; otherwise these media as a whole."""
        pixels, grids = self.inputs.get("pixel_values"), self.inputs.get("image_grid_thw")
        if pixels is None or self.inputs.keys() - {"pixel_values", "image_grid_thw"}:
            return [self]
        if grids is not None:  # patches of all images, one after the other
            parts = zip(pixels.split(grids.prod(-1).tolist()), grids.split(1), strict=True)
            found = [{"pixel_values": part, "image_grid_thw": grid} for part, grid in parts]
        elif pixels.ndim == _PICTURES:
            found = [{"pixel_values": part} for part in pixels.split(1)]
        else:
            return [self]
        return [Media.of(one) for one in found] if len(found) > 1 else [self]


class ImageEncoder:
    """Encodes images with the encoder of a model, one by one, and keeps their features until its weights change.

    So the turns of an episode, each of which has all images so far, encode each of them once.
    """

    def __init__(self) -> None:
        self._weights: tuple[int, int] | None = None
        self._kept: OrderedDict[str, Any] = OrderedDict()
        self._bytes = 0  # of those that are kept
        self.encoded = 0
        """How often the encoder was run."""

    def use(self, model: Any, version: int) -> None:
        """Encode with `model` from now on, whose weights are those of `version`; forget features of other weights."""
        if self._weights != (id(model), version):
            self._kept.clear()
            self._bytes = 0
        self._weights = (id(model), version)

    def features(self, model: Any, media: Media, device: torch.device) -> Any:
        """Return the output of the image encoder of `model` for `media`, as `mm_encoder_outputs` takes it."""
        found = [self._features(model, one, device) for one in media.each]
        return found[0] if len(found) == 1 else _joined(found)

    @torch.no_grad()
    def _features(self, model: Any, media: Media, device: torch.device) -> Any:
        if media.key not in self._kept:
            base = model.base_model
            accepted = inspect.signature(base.get_image_features).parameters
            inputs = {name: each.to(device) for name, each in media.inputs.items() if name in accepted}
            self._kept[media.key] = base.get_image_features(**inputs, return_dict=True)
            self._bytes += _bytes(self._kept[media.key])
            self.encoded += 1
        self._kept.move_to_end(media.key)
        while len(self._kept) > 1 and self._bytes > _KEPT_BYTES:
            self._bytes -= _bytes(self._kept.popitem(last=False)[1])
        return self._kept[media.key]


def _joined(outputs: Sequence[Any]) -> Any:
    """Return the outputs of the encoder for several images as it returns them for all at once.

    `deepstack_features` are of layers, each with features of all images.
    """
    made = {}
    for name in ("last_hidden_state", "pooler_output", "deepstack_features"):
        parts = [getattr(output, name, None) for output in outputs]
        if parts[0] is None:
            continue
        if name == "deepstack_features":
            made[name] = [_together(layer) for layer in zip(*parts, strict=True)]
        else:
            made[name] = _together(parts)
    return type(outputs[0])(**made)


def _together(parts: Sequence[Any]) -> Any:
    """Join tensors, or sequences of them, of several images."""
    if isinstance(parts[0], Tensor):
        return torch.cat(list(parts))
    return tuple(tensor for part in parts for tensor in part)


def _bytes(features: Any) -> int:
    """The memory of the tensors of an encoder's output, in whatever containers."""
    if isinstance(features, Tensor):
        return features.nbytes
    if isinstance(features, Mapping):
        features = features.values()
    return sum(map(_bytes, features)) if isinstance(features, Iterable) else 0


class ImagePlace(NamedTuple):
    """An image, and the number of consecutive `tokens` from `start` on that stand for its features."""

    media: Media
    start: int
    tokens: int


def image_places(request: GenerationRequest, config: Any) -> list[ImagePlace]:
    """Return the places of the images of a request for a model of `config`, in the order of their tokens.

    Raises `RequestError` unless the prompt has one token for each feature that the model makes of them, those of an
    image consecutive.
    """
    name, tokens = request.request_id, (request.prompt_ids == image_token(config)).nonzero()[:, 0].tolist()
    each = [*_counted(request, config)]
    expected = sum(count for _, count in each)
    if len(tokens) != expected:
        raise RequestError(
            f"the prompt of request {name!r} has {len(tokens)} image tokens, but the model makes {expected} features "
            f"of its images; give the token ids and the media of one and the same processor"
        )
    places, first = [], 0
    for media, count in each:
        own = tokens[first : first + count]
        if own != [*range(own[0], own[0] + count)]:
            raise RequestError(f"request {name!r} has other tokens among those of an image; they must be consecutive")
        places.append(ImagePlace(media, own[0], count))
        first += count
    return places


def _counted(request: GenerationRequest, config: Any) -> Iterator[tuple[Media, int]]:
    """Yield each image of a request, and the number of its features."""
    for media in Media.of(request.media).each if request.media else ():
        count = count_features(config, media.inputs)
        if not count:
            raise RequestError(
                f"request {request.request_id!r} has media {', '.join(sorted(media.inputs))}, of which the number of "
                f"features of a {config.model_type} model cannot be told"
            )
        yield media, count
