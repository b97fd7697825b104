"""The forward of rows with images: each distinct prompt is computed by itself, its rows are then decoded together.

A prompt by itself needs neither padding nor a mask around its images, so that the model computes what it computes in
training. The new tokens of all rows are computed as `PaddedRows` does.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, Self

import torch
from torch import Tensor

from rlframework.generation.sdk import ImageEncoder, Media, image_token
from rlframework_transformers.cache import stack_rows, whole_cache
from rlframework_transformers.row_forward import PaddedRows, Prefix

_TYPES = ("mm_token_type_ids", "token_type_ids")


class MediaRows(PaddedRows):
    """Rows with images, of a model that takes the features of its image encoder (`supports_media`).

    Positions after a prompt go on where the model lets them begin (`get_rope_index`), with its number of tokens
    otherwise.
    """

    def __init__(self, model: Any, pad_id: int, device: torch.device, encoder: ImageEncoder) -> None:
        super().__init__(model, pad_id, device)
        self._encoder = encoder
        self._media: Sequence[Media | None] = ()

    def expect(self, media: Sequence[Media | None]) -> None:
        """Set the media of the prompts that `start` or `join` begins with next."""
        self._media = media

    def start(self, prompts: Sequence[Tensor], longest: int, prefixes: Sequence[Prefix | None] = ()) -> Tensor:
        """See `RowForward.start`."""
        distinct: dict[tuple[object, ...], int] = {}
        keys = [
            (None if media is None else media.key, *prompt.tolist())
            for prompt, media in zip(prompts, self._media, strict=True)
        ]
        numbers = torch.tensor([distinct.setdefault(key, len(distinct)) for key in keys])
        firsts = [keys.index(key) for key in distinct]
        caches, logits, shifts = zip(*(self._begun(prompts[n], self._media[n], longest) for n in firsts), strict=True)
        self._width = max(len(prompts[n]) for n in firsts)
        stack_rows(caches, self._width, longest)
        self._cache, self._shifts = caches[0], torch.tensor(shifts).to(self._device)
        self._place([self._width - len(prompts[n]) for n in firsts])
        return self._expanded(torch.cat(logits), numbers)

    def _empty(self) -> Self:
        other = type(self)(self.model, self._pad_id, self._device, self._encoder)
        other.expect(self._media)
        return other

    def _joined(self, other: Self) -> None:
        self._shifts = torch.cat((self._shifts, other._shifts))

    def advance(self, tokens: Tensor) -> Tensor:
        """See `RowForward.advance`."""
        positions = (self._width - self._starts + self._shifts)[:, None]
        self._width += 1
        return self._cached(tokens[:, None], positions.expand(3, -1, -1) if self._in_3d else positions)

    def keep(self, rows: Tensor) -> None:
        """See `RowForward.keep`."""
        self._shifts = self._shifts[rows.to(self._device)]
        super().keep(rows)

    @property
    def _in_3d(self) -> bool:
        """Whether the model has a position in time, height and width for each token (M-RoPE)."""
        return hasattr(self.model.base_model, "get_rope_index")

    def _begun(self, prompt: Tensor, media: Media | None, longest: int) -> tuple[Any, Tensor, int]:
        """Compute a prompt; return its cache, the logits `[1, V]` after it, and the shift of the positions after it."""
        model, ids = self.model, prompt[None].to(self._device)
        cache = whole_cache(model.config, None if self._device.type == "cpu" else len(prompt) + longest)
        inputs: dict[str, Any] = {self._cache_name: cache}
        shift = 0
        if media is not None:
            types = (ids == image_token(model.config)).long()
            inputs["mm_encoder_outputs"] = {"image": self._encoder.features(model, media, self._device)}
            inputs |= {name: types for name in _TYPES if name in self._accepted}
            if self._in_3d:
                accepted = inspect.signature(model.base_model.get_rope_index).parameters
                grids = {name: each.to(self._device) for name, each in media.inputs.items() if name in accepted}
                positions, shifts = model.base_model.get_rope_index(ids, mm_token_type_ids=types, **grids)
                inputs["position_ids"], shift = positions, int(shifts[0, 0])
        return cache, self._call(ids, use_cache=True, **inputs), shift


def no_media(model: Any) -> str | None:
    """Return why `model` cannot generate from images with `MediaRows`; None if it can."""
    accepted = inspect.signature(model.forward).parameters
    if not hasattr(model.base_model, "get_image_features"):
        return f"{type(model).__name__} takes text only"
    if "mm_encoder_outputs" not in accepted:
        return f"{type(model).__name__} does not take features of images in transformers"
    if whole_cache(model.config) is None:
        return f"{type(model).__name__} has layers without keys and values, which generation from images needs"
    return None
