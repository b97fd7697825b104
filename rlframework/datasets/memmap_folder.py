"""The folder of a saved tensorclass: check it before it is mapped, and replace it atomically.

The layout is tensordict's own, so each reads what the other writes:

    meta.json              the class
    _tensordict/meta.json  batch size, and for each field its shape and dtype, or that it is nested
    _tensordict/F.memmap   the raw values of the field F, without a header
    _tensordict/F/         a nested tensordict (like `_tensordict`), or a nested tensorclass (like the whole folder)

Does not cover checksums: the values of a mapped file may be written at any time, so changed values are not detected;
the class's `check()` finds those that violate its contract.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensordict import is_tensor_collection

from rlframework.errors import DataError
from rlframework.files import replacing_directory

_META, _INNER = "meta.json", "_tensordict"
_SETTINGS = {"shape", "device", "_type", "_class", "_format_version", "_names"}


@contextmanager
def replacing_saved(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` at the end, as `replacing_directory` does.

    An existing `folder` must be empty or hold saved data; raises a `DataError` for any other file in it.
    """
    if folder.is_dir():
        foreign = sorted(path.name for path in folder.iterdir() if path.name not in (_META, _INNER))
        if foreign:
            raise DataError(
                f"{folder} holds {', '.join(foreign[:5])}, which saving would delete; give an empty or new folder"
            )
    elif os.path.lexists(folder):
        raise DataError(f"{folder} is a file; give an empty or new folder, or one written by save()")
    with replacing_directory(folder) as new:
        if folder.is_dir():
            shutil.copymode(folder, new)
        yield new


def reserve(folder: Path) -> None:
    """Allocate the disk space of all data files: writing to a mapped file on a full disk would kill the process."""
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    for path in folder.rglob("*.memmap"):
        size = path.stat().st_size
        if size:
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)


@contextmanager
def load_errors(folder: Path) -> Iterator[None]:
    """Turn what tensordict and the checks raise for a damaged folder into a `DataError`."""
    try:
        yield
    except (DataError, torch.OutOfMemoryError):
        raise
    except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise DataError(
            f"{folder}: cannot be loaded: {error}. Give a folder written by save(); if it is one, it is damaged or "
            "saving was interrupted: save the data again"
        ) from error


def check_files(folder: Path) -> None:
    """Check that the files are those that the meta files in `folder` and below describe, with every byte of them."""
    for path in [folder / _META, *folder.glob(f"*/**/{_META}")]:
        meta = json.loads(path.read_bytes())
        tensorclass = (path.parent / _INNER).is_dir()
        if not tensorclass and "shape" not in meta:
            raise ValueError(f"{path} has no batch size, or the folder {_INNER} next to it is missing")
        names = meta.get("_names")
        if names is not None and not (set(map(type, names)) <= {str, type(None)} and len(names) == len(meta["shape"])):
            raise ValueError(f"{path} has the dimension names {names!r}, which do not fit the batch size")
        for key, entry in meta.items():
            if key in _SETTINGS or (tensorclass and entry is None):
                continue
            if "type" not in entry:
                _check_size(path.parent / f"{key}.memmap", entry)
            elif not (path.parent / key).is_dir():
                raise ValueError(f"the folder {path.parent / key} is missing")


def _check_size(path: Path, entry: dict[str, Any]) -> None:
    dtype: torch.dtype = getattr(torch, entry["dtype"].removeprefix("torch."))
    size = math.prod(entry["shape"]) * dtype.itemsize
    if not path.exists() and size:
        raise ValueError(f"the file {path} is missing")
    if size and (not path.is_file() or path.stat().st_size != size):
        given = f"has {path.stat().st_size:,} bytes" if path.is_file() else "is not a regular file"
        raise ValueError(f"{path} {given}, but {dtype} of shape {entry['shape']} takes {size:,} bytes")


def check_contents(folder: Path, wanted: type, shell: Any) -> torch.Size:
    """Check class, fields and shapes of `shell`, the folder loaded without values, and return the batch size."""
    found: type = type(shell)
    if found is not wanted:
        raise DataError(
            f"{folder} holds a {found.__name__}, not a {wanted.__name__}; load it with {found.__name__}.load_memmap"
        )
    _check_node(shell)
    return torch.Size(shell.batch_size)


def _check_node(data: Any) -> None:
    keys = set(data.keys())
    fields = {field.name: field for field in dataclasses.fields(data)} if dataclasses.is_dataclass(data) else None
    if fields is not None:
        needed = {name for name, field in fields.items() if field.default is dataclasses.MISSING}
        if wrong := (needed - keys) | (keys - fields.keys()):
            raise ValueError(f"the fields {sorted(wrong)} of {type(data).__name__} are missing, or unknown")
    for key, value in data.items():
        if value.shape[: data.ndim] != data.batch_size:
            raise ValueError(
                f"{key!r} has shape {list(value.shape)}, which does not begin with the batch size "
                f"{list(data.batch_size)}"
            )
        if is_tensor_collection(value):
            _check_node(value)
