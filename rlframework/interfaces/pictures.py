"""Images of messages: a file, an encoded image or a decoded one, read when it is needed."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any


@dataclass(frozen=True, eq=False)
class Picture:
    """An image, not decoded. `source`: a file, an encoded image (PNG, JPEG, ...), or a PIL image.

    `where` names its row and place for errors; an image of more than `max_pixels` is rejected when it is decoded.
    """

    source: Path | bytes | Any
    where: str
    max_pixels: int = 50_000_000

    @cached_property
    def digest(self) -> str:
        """A digest of the content, equal for copies. Raises `OSError` for a file that cannot be read."""
        found = hashlib.blake2b(digest_size=16)
        if isinstance(self.source, (Path, bytes)):
            found.update(self.encoded())
        else:
            found.update(f"{self.source.mode} {self.source.size} ".encode())
            found.update(self.source.tobytes())
        return found.hexdigest()

    def __str__(self) -> str:
        if isinstance(self.source, Path):
            return str(self.source)
        return f"image of {len(self.source)} bytes" if isinstance(self.source, bytes) else "image"

    def encoded(self) -> bytes:
        """Return the bytes of the file, or the encoded image. Not for a PIL image."""
        return self.source.read_bytes() if isinstance(self.source, Path) else bytes(self.source)
