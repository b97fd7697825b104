"""Image parts of requests: data URIs, which become the images of messages. Nothing is read from files or a network."""

from __future__ import annotations

import base64
import binascii
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from io import BytesIO
from typing import Any

from rlframework.base.errors import ImageError
from rlframework.config.sections import ImagesConfig
from rlframework.datasets.pictures import decoded, scheme_of
from rlframework.interfaces.messages import ImagePart, Picture
from rlframework_serve.bodies import ApiError

IMAGE_PARTS = ("image_url", "input_image")
"""The types of parts that are images: of chat completions, and of the Responses API."""

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")
"""The formats of images in requests. Pillow knows more, of which some run other programs."""

_DETAILS = (None, "auto", "low", "high", "original")


MOST_LARGE_IMAGES = 4
"""The new images of a request have together at most this many times the pixels that one may have."""


@dataclass
class ImageReader:
    """Reads the image parts of one request. `config`: None if the endpoint serves text only.

    `kept`: the images that were read before, by their digests. A conversation is sent again with each request, so an
    image that is in `kept` is neither checked nor stored a second time. `pixels`: of those that were not in it.
    """

    config: ImagesConfig | None = None
    kept: dict[str, Picture] = field(default_factory=dict)
    pixels: int = 0

    def read(self, part: Mapping[str, Any], where: str) -> ImagePart:
        """Return an image part. Raises an `ApiError` that begins with `where` unless it is an image in a data URI."""
        if self.config is None:
            raise ApiError(
                f"{where} is an image, and this endpoint serves text only; set environment.images (rlframework serve "
                "RUN_OR_MODEL environment.images={}) for a vision-language model"
            )
        picture = Picture(_bytes_of(_address_of(part, where), where), where, self.config.max_pixels)
        if picture.digest not in self.kept:
            self.pixels += _pixels_of(picture)
            if self.pixels > (most := MOST_LARGE_IMAGES * self.config.max_pixels):
                raise ApiError(
                    f"{where}: the images of this request that are new have {self.pixels:,} pixels up to this one; "
                    f"they may have {most:,}, which is {MOST_LARGE_IMAGES} times environment.images.max_pixels"
                )
            _check(picture)
            self.kept[picture.digest] = picture
        return ImagePart(type="image", image=self.kept[picture.digest])


TEXT_ONLY = ImageReader()
"""Rejects images."""


def _address_of(part: Mapping[str, Any], where: str) -> str:
    """Return what `image_url` of a part is: an object with `url`, as in chat completions, or a text."""
    given = part.get("image_url")
    detail = given.get("detail") if isinstance(given, Mapping) else part.get("detail")
    if detail not in _DETAILS:
        raise ApiError(f"{where} has detail={detail!r:.80}; it must be auto, low, high or left out")
    address = given.get("url") if isinstance(given, Mapping) else given
    if not isinstance(address, str):
        raise ApiError(
            f"{where} of the type {part.get('type')} has image_url={given!r:.80}; it must be a data URI, such as "
            "data:image/png;base64,..."
        )
    return address


def _bytes_of(address: str, where: str) -> bytes:
    """Return the bytes in a data URI, the only kind of address that is read."""
    scheme = scheme_of(address)
    if scheme in ("http", "https"):
        raise ApiError(
            f"{where} is an address on the network ({address!r:.200}), which is never read, so that no client can make "
            "this machine send requests, also with environment.images.allow_addresses; send the image itself, as "
            "data:image/png;base64,..."
        )
    head, comma, body = address.partition(",")
    if scheme != "data" or not comma or not head.startswith("data:image/") or not head.endswith(";base64"):
        raise ApiError(f"{where} has image_url={address!r:.80}; it must be a data URI: data:image/png;base64,...")
    try:
        return base64.b64decode(body, validate=True)
    except (binascii.Error, ValueError) as error:
        raise ApiError(f"{where}: the data URI is not base64 ({error})") from error


def _pixels_of(picture: Picture) -> int:
    """Return the pixels of an image that is not decoded. `ApiError` if its header is not that of a served format."""
    from PIL import Image

    if not picture.source:
        raise ApiError(f"{picture.where}: the image is empty")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `max_pixels` is the limit
            width, height = Image.open(BytesIO(picture.encoded()), formats=FORMATS).size
    except Exception as error:  # Pillow's readers of headers raise anything
        raise ApiError(
            f"{picture.where}: the image is damaged, or in no format that is served ({', '.join(FORMATS)})"
        ) from error
    return int(width * height)


def _check(picture: Picture) -> None:
    """Raise `ApiError` unless the image can be decoded."""
    try:
        decoded(picture)
    except ImageError as error:
        raise ApiError(str(error)) from error
