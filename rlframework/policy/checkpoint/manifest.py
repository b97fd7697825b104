"""`checksums.json`: size and CRC-32 of each file of a directory, so that damage is found before anything is loaded.

    {"files": {"model.safetensors": {"bytes": 1234, "crc32": "cbf43926"}}, "crc32": "414fa339"}

The last checksum covers the list itself, as JSON without spaces and with sorted keys. CRC-32 protects against accidents
(a truncated copy, a flipped bit), not against tampering.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypedDict

from rlframework.base.errors import DataError

MANIFEST = "checksums.json"
SAVE = "save.json"
"""In each directory of a checkpoint: the id of the save that wrote it."""
_BLOCK = 1 << 20


class FileFacts(TypedDict):
    """A file's entry in the manifest: its size, and its CRC-32 in hexadecimal."""

    bytes: int
    crc32: str


Manifest = Mapping[str, FileFacts]
"""Entries by the file's path relative to the manifest's directory."""


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """Turn any error in the block, which reads the file `path`, into a `DataError` that names it."""
    try:
        yield
    except Exception as error:
        raise DataError(f"{path} is damaged or cannot be read: {type(error).__name__}: {error}") from error


def require_inside(name: str) -> None:
    """Raise a `ValueError` if the relative path `name` leads out of its directory."""
    if name.startswith("/") or ".." in name.split("/"):
        raise ValueError(f"it names {name!r}, which is outside its directory")


def describe_file(path: Path) -> FileFacts:
    """Return the current size and checksum of the file."""
    checksum = size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
    return {"bytes": size, "crc32": f"{checksum:08x}"}


def write_manifest(folder: Path, known: Manifest | None = None) -> None:
    """Write `checksums.json` for all files in `folder` and below; entries in `known` are not recomputed."""
    paths = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    facts = dict(known or {})
    facts |= {name: describe_file(path) for name, path in paths.items() if name not in facts and name != MANIFEST}
    text = json.dumps({"files": facts, "crc32": _own_checksum(facts)}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _own_checksum(facts: Manifest) -> str:
    return f"{zlib.crc32(json.dumps(facts, sort_keys=True, separators=(',', ':')).encode()):08x}"


def read_manifest(folder: Path) -> Manifest | None:
    """Read `checksums.json` in `folder`; None if there is none. Raises a `DataError` if it cannot be read."""
    path = folder / MANIFEST
    if not path.exists():
        return None
    with reading(path):
        whole = json.loads(path.read_text(encoding="utf-8"))
        files: Manifest = whole["files"]
        if whole["crc32"] != _own_checksum(files):
            raise ValueError("its own checksum does not match")
        for name in files:
            require_inside(name)
    return files


def check_files(folder: str | Path, *, required: bool = False, share: tuple[int, int] = (0, 1)) -> None:
    """Raise a `DataError` that names the first file in `folder` that differs from its manifest.

    `required`: a folder without a manifest is an error too. `share`: `(rank, ranks)`; each rank checks all sizes and
    reads its share of the files.
    """
    folder, remedy = Path(folder), "Use another checkpoint, or copy this one again"
    manifest = read_manifest(folder)
    if manifest is None:
        if required:
            raise DataError(f"{folder} has no {MANIFEST}: it is not a checkpoint, or an incomplete one")
        return
    for name, facts in manifest.items():
        path, wanted = folder / name, facts["bytes"]
        try:
            size = path.stat().st_size
        except OSError as error:
            raise DataError(f"{path} is missing or cannot be read: {error.strerror}. {remedy}") from error
        if size != wanted:
            damage = "is truncated" if size < wanted else "is damaged"
            raise DataError(f"{path} {damage}: it has {size} bytes, but {wanted} were written. {remedy}")
    rank, ranks = share
    for name in list(manifest)[rank::ranks]:
        if describe_file(folder / name) != manifest[name]:
            raise DataError(f"{folder / name} is damaged: its contents differ from what was written. {remedy}")


def write_save_id(folder: Path, save: str) -> None:
    """Write `save.json`: the same in all directories of a checkpoint that one save wrote."""
    (folder / SAVE).write_text(json.dumps({"save": save}) + "\n", encoding="utf-8")


def require_one_save(*folders: Path) -> None:
    """Raise a `DataError` if the directories are of different saves. Those without `save.json` are not compared."""
    saves = dict[str, Path]()
    for path in (folder / SAVE for folder in folders):
        if path.exists():
            with reading(path):
                saves[str(json.loads(path.read_text(encoding="utf-8"))["save"])] = path.parent
    if len(saves) > 1:
        raise DataError(
            f"{' and '.join(map(str, saves.values()))} are of different saves ({SAVE} differs): one was "
            "interrupted between them, or wrote only the weights. Load the weights alone, or another checkpoint"
        )
