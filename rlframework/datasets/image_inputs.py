"""The images of rows as a model takes them: tokens in the row, and tensors beside it.

The chat template writes one placeholder for each image. It is replaced exactly once, by what the model's own processor
makes of that image, before the text is tokenised. The number of image tokens of each row is compared with the number of
features that the model will make of its images.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from rlframework.base.errors import ImageError
from rlframework.batch.packed_tensor import PackedTensor
from rlframework.datasets.pictures import decoded
from rlframework.huggingface.vision_models import count_features, image_token, load_processor
from rlframework.interfaces.messages import Picture

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEPT_BYTES = 1 << 28
"""Processed images that are kept, so that a row is processed once for its tokens and once more for its tensors."""

_TOKEN_TYPES = ("mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True, eq=False)
class ProcessedImages:
    """The images of a row: `texts`, what replaces each placeholder, `tensors` by their names, and `sizes` in pixels.

    `features`: of the model's encoder; None if the kind is unknown.
    """

    texts: Sequence[str]
    tensors: Mapping[str, Tensor]
    sizes: Sequence[tuple[int, int]]
    features: int | None

    @property
    def bytes(self) -> int:
        """The memory of the tensors."""
        return sum(each.nbytes for each in self.tensors.values())


class ImageInputs:
    """Makes the inputs of the model `name`, with `config`, from images, with its own processor.

    The same images give the same tensors, so that rows of a group share them. Each different image is processed once,
    as long as it is kept; the rows of several are joined. Several threads may use one object. Raises a `DataError` if
    the model has no processor.
    """

    def __init__(self, name: str, config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        self._processor, self._config = load_processor(name, config, tokenizer), config
        self.token = image_token(config)
        """The token that stands for a feature of an image."""
        self._placeholder = str(self._processor.image_token)
        self._kept: OrderedDict[tuple[str, ...], ProcessedImages] = OrderedDict()
        self._bytes = 0  # of those that are kept
        self._lock = threading.Lock()
        self.made = 0
        """How many images were decoded and processed."""
        self._dims, self._types = self._probe()

    def processed(self, pictures: Sequence[Picture]) -> ProcessedImages:
        """Return the images of a row. Raises an `ImageError` that names its row."""
        for picture in pictures:
            if not isinstance(picture, Picture):
                raise ImageError(
                    f"a message has an image of type {type(picture).__name__}; it must be an "
                    "rlframework.interfaces.messages.Picture"
                )
        with self._lock:
            return self._found(tuple(pictures))

    def _found(self, pictures: tuple[Picture, ...]) -> ProcessedImages:
        """Return what is kept of images, or made of them."""
        key = tuple(picture.digest for picture in pictures)
        if key in self._kept:
            self._kept.move_to_end(key)
            return self._kept[key]
        made = self._joined([self._found((picture,)) for picture in pictures]) if len(pictures) > 1 else None
        made = self._made(pictures) if made is None else made
        self._kept[key] = made
        self._bytes += made.bytes
        while len(self._kept) > 1 and self._bytes > _KEPT_BYTES:
            self._bytes -= self._kept.popitem(last=False)[1].bytes
        return made

    def _joined(self, each: Sequence[ProcessedImages]) -> ProcessedImages | None:
        """Return the images of a row, which were processed one by one; None if the processor pads them together."""
        for name, dim in self._dims.items():
            shapes = {(*one.tensors[name].shape[:dim], *one.tensors[name].shape[dim + 1 :]) for one in each}
            if len(shapes) > 1:
                return None
        tensors = {name: torch.cat([one.tensors[name] for one in each], dim) for name, dim in self._dims.items()}
        texts, sizes = [text for one in each for text in one.texts], [size for one in each for size in one.sizes]
        return ProcessedImages(texts, tensors, sizes, count_features(self._config, tensors))

    def _made(self, pictures: Sequence[Picture]) -> ProcessedImages:
        images = [decoded(picture) for picture in pictures]
        self.made += len(images)
        try:
            return self._process(images)
        except Exception as error:  # processors raise anything
            sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
            raise ImageError(
                f"{pictures[0].where}: the model's processor rejects the images of this row ({sizes} pixels): "
                f"{error!s:.300}"
            ) from error

    def expanded(self, texts: Sequence[str], pictures: Sequence[Picture]) -> list[str]:
        """Return the consecutive `texts` of a row, with its images in place of their placeholders, in order.

        Raises an `ImageError` unless there are as many placeholders as images.
        """
        places = sum(text.count(self._placeholder) for text in texts)
        if places != len(pictures):
            where = f"{pictures[0].where}: " if pictures else ""
            raise ImageError(
                f"{where}the chat template wrote {places} placeholders {self._placeholder!r} for {len(pictures)} "
                "images; a text must not contain the placeholder, and the template must write one for each image"
            )
        if not pictures:
            return list(texts)
        found = iter(self.processed(pictures).texts)
        pieces = [text.split(self._placeholder) for text in texts]
        return ["".join([first, *(next(found) + piece for piece in rest)]) for first, *rest in pieces]

    def check(self, ids: Sequence[int], pictures: Sequence[Picture]) -> None:
        """Raise an `ImageError` unless the row of `ids` has a token for each feature of its images."""
        tokens, features = list(ids).count(self.token), self.processed(pictures).features if pictures else 0
        if features is not None and tokens != features:
            where = f"{pictures[0].where}: " if pictures else ""
            raise ImageError(
                f"{where}the row has {tokens} image tokens, but the model makes {features} features of its images "
                f"({self.described(pictures)}); truncation (algorithm.max_tokens) must not cut an image off, and the "
                "processor must be that of the model"
            )

    def described(self, pictures: Sequence[Picture]) -> str:
        """Return the number of images, their sizes and the number of their tokens, for messages."""
        if not pictures:
            return "no images"
        made = self.processed(pictures)
        sizes = ", ".join(f"{width} x {height}" for width, height in made.sizes)
        count = f"{len(pictures)} image{'s' if len(pictures) > 1 else ''} of {sizes} pixels"
        return count if made.features is None else f"{count}: {made.features} image tokens"

    def columns(self, rows: Sequence[Sequence[Picture]], input_ids: Tensor) -> dict[str, PackedTensor | Tensor]:
        """Return the columns of a batch that has `rows` of images and `input_ids [B, S]`, also if no row has any.

        Rows with the same images share their tensors. Token types are `[B, S]` int64, 1 at image tokens.
        """
        made = [self.processed(pictures) if pictures else None for pictures in rows]
        found: dict[str, PackedTensor | Tensor] = {
            name: PackedTensor([None if row is None else row.tensors[name] for row in made], dim)
            for name, dim in self._dims.items()
        }
        if self._types is not None:
            found[self._types] = (input_ids == self.token).long()
        return found

    def _process(self, images: Sequence[Any]) -> ProcessedImages:
        made = self._call(images)
        texts = [replaced["replacement"] for replaced in made["text_replacement_offsets"][0]]
        tensors = {name: made[name] for name in self._names(made)}
        sizes = [(image.width, image.height) for image in images]
        return ProcessedImages(texts, tensors, sizes, count_features(self._config, tensors))

    def _call(self, images: Sequence[Any]) -> Mapping[str, Any]:
        text = self._placeholder * len(images)
        made: Mapping[str, Any] = self._processor(
            text=[text], images=list(images), return_text_replacement_offsets=True, return_tensors="pt"
        )
        return made

    def _probe(self) -> tuple[dict[str, int], str | None]:
        """Return along which dimension each input of several images is joined, and the name of the token types."""
        from PIL import Image

        # of a size and shape that all kinds take
        image = Image.new("RGB", (64, 64), (128, 128, 128))
        one, two = self._call([image]), self._call([image, image])
        types = next((name for name in _TOKEN_TYPES if name in one), None)
        dims = {
            name: next(dim for dim, size in enumerate(two[name].shape) if size != one[name].shape[dim])
            for name in self._names(one)
        }
        return dims, types

    def _names(self, made: Mapping[str, Any]) -> list[str]:
        tokens = {"input_ids", "attention_mask", "text_replacement_offsets", *_TOKEN_TYPES}
        return [name for name, value in made.items() if name not in tokens and isinstance(value, torch.Tensor)]
