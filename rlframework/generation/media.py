"""The images of generation requests, and their features, which are computed once for each different image."""

from __future__ import annotations

import hashlib
import inspect
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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


class ImageEncoder:
    """Encodes images with the encoder of a model, and keeps their features until its weights change."""

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

    @torch.no_grad()
    def features(self, model: Any, media: Media, device: torch.device) -> Any:
        """Return the output of the image encoder of `model` for `media`, as `mm_encoder_outputs` takes it."""
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


def _bytes(features: Any) -> int:
    """The memory of the tensors of an encoder's output, in whatever containers."""
    if isinstance(features, Tensor):
        return features.nbytes
    if isinstance(features, Mapping):
        features = features.values()
    return sum(map(_bytes, features)) if isinstance(features, Iterable) else 0
