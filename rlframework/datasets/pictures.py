"""Images in rows of data: where they come from, which turns they belong to, and decoding them.

A row has images as parts of a message, in OpenAI's format (`image_url`) or that of transformers (`image`), or in
columns of their own, as LLaVA's data has them: these take the places of `<image>` in its texts, in order. Without any
such place they precede the first user turn. A `video` is a list of frames, and becomes that many images. Addresses on
the network are read only with `environment.images.allow_addresses`.
"""

from __future__ import annotations

import base64
import binascii
import logging
import time
import urllib.request
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from http.client import HTTPException
from io import BytesIO
from pathlib import Path
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import unquote, urlparse, urlsplit

from rlframework.base.errors import ConfigError, ImageError
from rlframework.base.secrets import hide_in_text
from rlframework.config.environments import RowsConfig
from rlframework.config.sections import ImagesConfig
from rlframework.interfaces.messages import ContentPart, ImagePart, Message, Picture, TextPart

_LOG = logging.getLogger(__name__)

PLACEHOLDER = "<image>"
"""The place of an image in the texts of rows that have images in a column."""

_NETWORK = ("http", "https", "ftp", "s3", "gs")

KINDS = ("image", "image_url", "video")
"""The types of content parts that are images."""

TIMEOUT = 20.0
"""Seconds that an attempt to read an address may take."""

MAX_BYTES = 64 * 2**20
"""Most bytes of an image at an address."""

_ATTEMPTS = 2
_PIECE = 1 << 16


class PictureReader:
    """Makes the images of rows as `section` says; relative paths are relative to `section.root`, or else to `root`.

    `addresses`: reads addresses on the network, if `section` allows it; None: they are rejected.
    """

    def __init__(self, section: ImagesConfig, root: Path, addresses: ImageAddresses | None = None) -> None:
        _require_pillow()
        self._section, self._addresses = section, addresses
        self._root = Path(section.root) if section.root is not None else root

    def of(self, value: Any, where: str) -> list[Picture]:
        """Return the images of a column, or of one of a list of them: nothing is decoded."""
        if value is None:
            return []
        if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
            return [self._picture(each, f"{where}, image {number}") for number, each in enumerate(value)]
        return [self._picture(value, where)]

    def parts(self, part: Mapping[str, Any], where: str) -> list[ContentPart]:
        """Return the images of a content part; the part itself as `PLACEHOLDER` if a column has its image."""
        kind = str(part["type"])
        value = part.get(kind)
        if isinstance(value, Mapping) and "url" in value:
            value = value["url"]
        if value is None:
            value = next((part[key] for key in ("url", "path", "bytes", "base64") if part.get(key) is not None), None)
            if isinstance(value, str) and part.get("base64") == value:
                value = f"data:;base64,{value}"
        if value is None:
            return [TextPart(type="text", text=PLACEHOLDER)]
        return [ImagePart(type="image", image=picture) for picture in self.of(value, where)]

    def placed(self, turns: Sequence[Message], supply: Sequence[Picture], where: str) -> list[Message]:
        """Return `turns` with the images of `supply` in place of each `PLACEHOLDER`; raise unless the numbers agree."""
        places = sum(_text(part).count(PLACEHOLDER) for turn in turns for part in _parts(turn))
        user = next((number for number, turn in enumerate(turns) if turn["role"] == "user"), None)
        if places != len(supply) and (places or user is None):
            raise ImageError(
                f"{where}: there are {places} places for images ({PLACEHOLDER} in a text, or parts without an image) "
                f"and {len(supply)} images in the columns; they must be equally many"
            )
        left = deque(supply)
        placed = [_with_images(turn, left) for turn in turns] if places else list(turns)
        if left:
            assert user is not None
            given = [ImagePart(type="image", image=picture) for picture in left]
            placed[user] = {**placed[user], "content": [*given, *_parts(placed[user])]}
        for number, turn in enumerate(placed, 1):
            if turn["role"] == "assistant" and any(part["type"] == "image" for part in _parts(turn)):
                raise ImageError(f"{where}, turn {number}: an assistant turn has an image; models here write text only")
        return placed

    def _picture(self, value: Any, where: str) -> Picture:
        if isinstance(value, Mapping):  # as `datasets` stores images
            value = value.get("bytes") if value.get("bytes") is not None else value.get("path")
        if isinstance(value, str) and (scheme := scheme_of(value)) in _NETWORK:
            where = f"{where}, {hide_in_text(value)[:200]}"
            value = self._downloaded(value, scheme, where)
        elif isinstance(value, str):
            value = self._location(value, where)
        elif not isinstance(value, bytes) and not hasattr(value, "convert"):
            raise ImageError(
                f"{where}: an image must be a path, bytes, a data URI or a PIL image, not {type(value).__name__}"
            )
        return Picture(value, where, self._section.max_pixels)

    def _location(self, text: str, where: str) -> Path | bytes:
        """The file or the bytes that a text names."""
        if text.startswith("data:"):
            try:
                return base64.b64decode(text.partition(",")[2], validate=True)
            except binascii.Error as error:
                raise ImageError(f"{where}: the data URI is not base64 ({error})") from error
        return self._root / (unquote(urlparse(text).path) if scheme_of(text) == "file" else text)

    def _downloaded(self, address: str, scheme: str, where: str) -> bytes:
        """The bytes at an address on the network, if it may be read."""
        if self._addresses is None:
            raise ImageError(f"{where}: an address on the network is not read here; give the image itself")
        if scheme not in ("http", "https"):
            raise ImageError(f"{where}: of addresses on the network only http and https are read; store it in a file")
        if not self._section.allow_addresses:
            raise ImageError(
                f"{where}: an address on the network, which is not read unless environment.images.allow_addresses is "
                "true; set it, or store the image in a file and give its path"
            )
        return self._addresses.read(address, where)


def reader_of(config: RowsConfig, addresses: ImageAddresses, *, validation: bool) -> PictureReader | None:
    """Return the reader of the images of training rows, or of those given for `validation`; None if rows have none."""
    if config.images is None:
        return None
    path = config.validation_path if validation and config.validation_path else config.path
    return PictureReader(config.images, _folder_of(path), addresses)


def scheme_of(text: str) -> str:
    """Return the scheme of an address in lower case; empty for a path."""
    return text[:8].partition(":")[0].lower() if ":" in text[:8] else ""


def _folder_of(path: str | None) -> Path:
    """The folder that relative paths in the data `path` start from: its own; the current one if it has none."""
    given = Path(path or ".").expanduser()
    return given if given.is_dir() else given.parent


def log_left_out(problems: Sequence[ImageError], rows: int) -> None:
    """Log how many of `rows` rows are left out, because their images cannot be used, if any."""
    if problems:
        count = f"{len(problems):,} of {rows:,} rows"
        _LOG.warning("%s are left out, because their images cannot be used; the first: %s", count, problems[0])


def decoded(picture: Picture) -> Any:
    """Return `picture` as a PIL image in RGB, upright as its EXIF data says.

    Raises an `ImageError` that names its row for what cannot be read or decoded, and for more pixels than allowed,
    which is known before anything is decoded.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    if isinstance(picture.source, Path) and not picture.source.is_file():
        raise ImageError(f"{picture.where}: there is no image file {picture.source}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)  # `max_pixels` is the limit
            image = _opened(picture)
            width, height = image.size
            if width < 1 or height < 1 or width * height > picture.max_pixels:
                raise ImageError(
                    f"{picture.where}: the image has {width} x {height} pixels; it may have 1 to "
                    f"{picture.max_pixels:,} (environment.images.max_pixels)"
                )
            return ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as error:
        what = "is empty" if not picture.encoded() else "is in no known format, or damaged"
        raise ImageError(f"{picture.where}: the image {_name(picture)}{what}") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:  # as Pillow's decoders raise
        raise ImageError(f"{picture.where}: the image {_name(picture)}cannot be decoded ({error})") from error


def _opened(picture: Picture) -> Any:
    from PIL import Image

    if isinstance(picture.source, (Path, bytes)):
        return Image.open(BytesIO(picture.encoded()))
    return picture.source


def _name(picture: Picture) -> str:
    return f"{picture.source} " if isinstance(picture.source, Path) else ""


def _parts(turn: Message) -> Sequence[ContentPart]:
    content = turn["content"]
    return [TextPart(type="text", text=content)] if isinstance(content, str) else content


def _text(part: ContentPart) -> str:
    return part["text"] if part["type"] == "text" else ""


def _with_images(turn: Message, supply: deque[Picture]) -> Message:
    """`turn` with the next images of `supply` at its places, without the whitespace around them."""
    if not any(PLACEHOLDER in _text(part) for part in _parts(turn)):
        return turn
    parts: list[ContentPart] = []
    for part in _parts(turn):
        texts = _text(part).split(PLACEHOLDER)
        if len(texts) == 1:
            parts.append(part)
            continue
        for number, text in enumerate(texts):
            if number:
                parts.append(ImagePart(type="image", image=supply.popleft()))
            if text := text.strip():
                parts.append(TextPart(type="text", text=text))
    return {**turn, "content": parts}


def _require_pillow() -> None:
    try:
        import PIL  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "environment.images needs Pillow to decode images: pip install 'rlframework-core[vision]'"
        ) from error


class ImageAddresses:
    """Reads images at http and https addresses, each once: what was read, or why it was not, is kept in memory.

    Redirections are followed to such addresses only. Whether an address is of a private network is not checked.
    """

    def __init__(self) -> None:
        self._known: dict[str, bytes | str] = {}

    def read(self, address: str, where: str) -> bytes:
        """Return what is at `address`, in any format. Raises an `ImageError` that begins with `where` if that fails."""
        if address not in self._known:
            self._known[address] = _read(address)
        found = self._known[address]
        if isinstance(found, str):
            raise ImageError(f"{where}: the image cannot be read: {found}")
        return found


def _read(address: str) -> bytes | str:
    """Return what is at `address`, or why it cannot be read. What may pass, such as a timeout, is tried again once."""
    why = ""
    for _ in range(_ATTEMPTS):
        try:
            return _attempt(address)
        except HTTPError as error:
            with error:
                why = f"the server answers {error.code} {error.reason}"
            if error.code < 500 and error.code != 429:
                break
        except (OSError, HTTPException, ValueError) as error:
            why = str(error.reason if isinstance(error, URLError) else error) or type(error).__name__
            if isinstance(error, (_TooLarge, ValueError)):
                break
    return hide_in_text(why)


def _attempt(address: str) -> bytes:
    if "@" in urlsplit(address).netloc:  # `urllib` would take the password for a port, and print it
        raise ValueError("addresses with a user name or password are not supported")
    opener, deadline = urllib.request.OpenerDirector(), time.monotonic() + TIMEOUT
    for handler in _HANDLERS:  # those of files and FTP are left out, so that no redirection leads there
        opener.add_handler(handler())
    request = urllib.request.Request(address, headers={"User-Agent": "rlframework", "Accept": "image/*"})
    pieces, size = list[bytes](), 0
    with opener.open(request, timeout=TIMEOUT) as response:
        while piece := response.read1(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BYTES:
                raise _TooLarge(f"it has more than {MAX_BYTES:,} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(f"it takes more than {TIMEOUT:g} s")
        if response.length:
            raise OSError(f"the connection ended {response.length:,} bytes before the end")
    return b"".join(pieces)


class _TooLarge(OSError):
    """More bytes than allowed."""


_HANDLERS = (
    urllib.request.ProxyHandler,
    urllib.request.UnknownHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPErrorProcessor,
)
