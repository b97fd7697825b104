"""Small copies of the images of logged samples, in the run's directory: one JPEG for each different image."""

from __future__ import annotations

import base64
import re
from io import BytesIO
from pathlib import Path

from rlframework.base.files import write_atomically
from rlframework.datasets.pictures import decoded
from rlframework.interfaces.pictures import Picture

FOLDER = "sample_images"
"""The folder of a run's directory that has the copies."""
SIDE = 128
"""Maximum width and height of a copy in pixels."""
_QUALITY = 85
_NAME = re.compile(r"[0-9a-f]{32}\.jpg")
_JPEG = b"\xff\xd8\xff"
_MOST_BYTES = 65_536
"""No copy of `SIDE` pixels has as many, so a larger file is none."""


def store_image(output_dir: Path, picture: Picture) -> str:
    """Store a small copy of `picture` unless the run has one; return its file's name, which is a digest."""
    name = f"{picture.digest}.jpg"
    path = output_dir / FOLDER / name
    if not path.exists():
        path.parent.mkdir(exist_ok=True)
        small, file = decoded(picture), BytesIO()
        small.thumbnail((SIDE, SIDE))
        small.save(file, "JPEG", quality=_QUALITY, subsampling=0)
        write_atomically(path, file.getvalue())
    return name


def image_uri(output_dir: Path, name: str) -> str | None:
    """Return the stored image `name` as a data URI; None if there is none.

    A run's files may be others' work, so nothing else is read, whatever is named.
    """
    path = output_dir / FOLDER / name
    if not _NAME.fullmatch(name) or not path.is_file() or path.stat().st_size > _MOST_BYTES:
        return None
    content = path.read_bytes()
    return f"data:image/jpeg;base64,{base64.b64encode(content).decode()}" if content.startswith(_JPEG) else None
