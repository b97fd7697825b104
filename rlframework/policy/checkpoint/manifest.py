"""`checksums.json`: size and CRC-32 of each file of a directory, so that damage is found before a number is read.

    {"files": {"model.safetensors": {"bytes": 1234, "crc32": "cbf43926"}}, "crc32": "414fa339"}

The last one is of the list itself, as JSON without spaces and with sorted keys.

CRC-32 is there against accidents (a truncated copy, a flipped bit), not against whoever means harm.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypedDict

from rlframework.errors import DataError

MANIFEST = "checksums.json"
_BLOCK = 1 << 20


class FileFacts(TypedDict):
    """What the manifest says of one file: its size, and its CRC-32 in hexadecimal."""

    bytes: int
    crc32: str


Manifest = Mapping[str, FileFacts]
"""Path of a file, from the directory that it is in or below, to its facts."""


def describe_file(path: Path) -> FileFacts:
    """Size and checksum of the file as it is now."""
    checksum = size = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            checksum = zlib.crc32(block, checksum)
            size += len(block)
    return {"bytes": size, "crc32": f"{checksum:08x}"}


def describe_files(folder: Path, names: Iterable[str] | None = None) -> dict[str, FileFacts]:
    """Facts of the files `names` in `folder`; by default of all that are there and below but the manifest."""
    return {name: describe_file(folder / name) for name in (_names(folder) if names is None else names)}


def _names(folder: Path) -> list[str]:
    files = (path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return sorted(name for name in files if name != MANIFEST)


def write_manifest(folder: Path, known: Manifest | None = None) -> None:
    """Write `checksums.json` of all files in `folder` and below; those in `known` are taken as told."""
    known = known or {}
    facts = {**known, **describe_files(folder, [name for name in _names(folder) if name not in known])}
    text = json.dumps({"files": facts, "crc32": _own_checksum(facts)}, indent=1)
    (folder / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _own_checksum(facts: Manifest) -> str:
    return f"{zlib.crc32(json.dumps(facts, sort_keys=True, separators=(',', ':')).encode()):08x}"


def read_manifest(folder: Path) -> Manifest | None:
    """What `checksums.json` in `folder` says, None where there is none; a `DataError` where it cannot be read."""
    path = folder / MANIFEST
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        found = whole["files"]
        if whole["crc32"] != _own_checksum(found):
            raise ValueError("its own checksum is another")
        return {
            str(name): {"bytes": int(facts["bytes"]), "crc32": str(facts["crc32"])} for name, facts in found.items()
        }
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is damaged or cannot be read: {type(error).__name__}: {error}") from error


def check_files(folder: str | Path, *, required: bool = False, share: tuple[int, int] = (0, 1)) -> None:
    """A `DataError` that names the first file in `folder` that is not what its manifest says.

    `required`: a folder without a manifest is one too. `share`: of `(rank, ranks)`, each rank looks at all sizes and
    reads its part of the files.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    if manifest is None:
        if required:
            raise DataError(f"{folder} has no {MANIFEST}: it is no checkpoint, or not a whole one")
        return
    for name, facts in manifest.items():
        _check_size(folder / name, facts["bytes"])
    rank, ranks = share
    for name in list(manifest)[rank::ranks]:
        if describe_file(folder / name) != manifest[name]:
            raise DataError(f"{folder / name} is damaged: its bytes are not those that were written. {_REMEDY}")


_REMEDY = "Take another checkpoint, or copy it again"


def _check_size(path: Path, wanted: int) -> None:
    try:
        found = path.stat().st_size
    except OSError as error:
        raise DataError(f"{path} is missing or cannot be read: {error.strerror}. {_REMEDY}") from error
    if found != wanted:
        what = "is truncated" if found < wanted else "is damaged"
        raise DataError(f"{path} {what}: it has {found} bytes, and {wanted} were written. {_REMEDY}")
