"""The folder of a saved tensorclass: check it before it is mapped, and replace it atomically.

The layout is tensordict's own, so each reads what the other writes:

    meta.json              the class
    _tensordict/meta.json  batch size, and for each field its shape and dtype, or that it is nested
    _tensordict/F.memmap   the raw values of the field F, without a header
    _tensordict/F/         a nested tensordict (like `_tensordict`), or a nested tensorclass (like the whole folder)

Shape and dtype must account for every byte of a data file: reading a file that is too short would kill the process
(SIGBUS), or return zeros silently. Does not cover checksums: the values of a mapped file may be written at any time, so
changed values are not detected; the class's `check()` finds those that violate its contract.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from rlframework.errors import DataError
from rlframework.files import replacing_directory

META, INNER, PICKLE = "meta.json", "_tensordict", "other.pickle"

DTYPES = {
    str(dtype): dtype
    for dtype in (
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
        *(torch.bfloat16, torch.float16, torch.float32, torch.float64),
    )
}
"""The dtypes that a saved field may have, by name."""

_RESERVED_KEYS = {"shape", "device", "_type", "_class", "_format_version", "_names", INNER, META}
_PLAIN_KEY = re.compile(r"[\w.~-]+")
_TENSORDICT = "tensordict:TensorDict"
_NAME = {str, type(None)}


def is_plain_key(key: str) -> bool:
    """Whether `key` is allowed as the name of a saved field, and so of its file."""
    return bool(_PLAIN_KEY.fullmatch(key)) and key not in _RESERVED_KEYS and key.strip(".") != ""


CLASSES: dict[str, type] = {}
"""The tensorclasses that may be saved and loaded, by their name in `meta.json`: `str(class)`."""

FORMER_MODULES = {
    "rlframework.datasets.reward_data": "rlframework.data.reward_data",
    "rlframework.datasets.preferences": "rlframework.data.preferences",
}
"""Modules of tensorclasses, and their former names, which folders of earlier releases have in `meta.json`."""


def check_folder(folder: Path, wanted: type) -> torch.Size:
    """Check that `folder` holds a `wanted` that can be loaded safely, and return its batch size; else a `DataError`.

    Extra files are ignored. Reads the meta files, and only the sizes of the data files.
    """
    if not folder.is_dir():
        there = "it is a file" if folder.exists() else "there is no such folder"
        raise DataError(f"no {wanted.__name__} can be loaded from {folder}: {there}; give a folder written by save()")
    found, shape = _check_collection(folder, torch.Size())
    if found is not wanted:
        raise DataError(
            f"{folder} holds a {found.__name__}, not a {wanted.__name__}; load it with {found.__name__}.load_memmap"
        )
    return shape


@contextmanager
def replacing_saved(folder: Path) -> Iterator[Path]:
    """Yield an empty folder that replaces `folder` at the end, as `replacing_directory` does.

    An existing `folder` must be empty or hold saved data; raises a `DataError` for any other file in it.
    """
    if folder.is_dir():
        foreign = sorted(path.name for path in folder.iterdir() if path.name not in (META, INNER))
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


def _check_collection(folder: Path, batch: torch.Size) -> tuple[type, torch.Size]:
    """Return the class saved in `folder`, and its batch size, which must begin with `batch`."""
    meta = _read(folder)
    kind = meta.get("_type")
    if kind == str(TensorDict) or meta.get("_class") == _TENSORDICT:
        return TensorDict, _check_fields(folder, meta, batch, None)
    found = CLASSES.get(kind) if isinstance(kind, str) else None
    if found is None:
        raise DataError(
            f"{folder / META}: unknown class {kind!r} (known: TensorDict, {class_names()}). Import the module that "
            "defines it, or save the data with one of these"
        )
    fields = {field.name: field.default is dataclasses.MISSING for field in dataclasses.fields(found)}
    strange = [key for key, value in meta.items() if key[:1] != "_" and not (key in fields and value is None)]
    if strange:
        raise _damaged(folder / META, f"it has {strange[0]!r}, which is not a tensor of {found.__name__}")
    if (folder / PICKLE).exists():
        raise DataError(
            f"{folder / PICKLE}: pickled data is not loaded, because it can run arbitrary code; save tensors only"
        )
    if not (folder / INNER).is_dir() or (folder / INNER).is_symlink():
        raise _damaged(folder, f"the folder {INNER} is missing")
    inner = _read(folder / INNER)
    if inner.get("_type") != str(TensorDict) and inner.get("_class") != _TENSORDICT:
        raise _damaged(folder / INNER / META, f"the class is {inner.get('_type')!r}, not TensorDict")
    return found, _check_fields(folder / INNER, inner, batch, fields)


def _check_fields(
    folder: Path,
    meta: dict[str, Any],
    batch: torch.Size,
    fields: Mapping[str, bool] | None,
) -> torch.Size:
    """Check each entry and return the batch size. `fields`: the allowed fields, and whether each is required."""
    shape = _shape(meta.get("shape"))
    if shape is None or shape[: len(batch)] != batch:
        raise _damaged(
            folder / META, f"the batch size is {meta.get('shape')!r}, which does not begin with {list(batch)}"
        )
    if meta.get("device", "None") not in ("cpu", "None"):
        raise _damaged(folder / META, f"the device is {meta['device']!r}, not cpu")
    names = meta.get("_names")
    named = isinstance(names, list) and len(names) == len(shape) and set(map(type, names)) <= _NAME
    if names is not None and not named:
        raise _damaged(folder / META, f"the dimension names {names!r} do not fit the batch size {list(shape)}")
    entries = {key: value for key, value in meta.items() if key not in _RESERVED_KEYS and key[:1] != "_"}
    missing = [name for name, needed in (fields or {}).items() if needed and name not in entries]
    if missing:
        raise _damaged(folder / META, f"the field {missing[0]!r} is missing (found: {sorted(entries)})")
    for key, entry in entries.items():
        if not is_plain_key(key) or (fields is not None and key not in fields) or not isinstance(entry, dict):
            raise _damaged(folder / META, f"the entry {key!r} is not a saved field")
        if "type" in entry:
            _check_nested(folder / key, entry, shape)
        else:
            _check_tensor(folder, key, entry, shape)
    return shape


def _check_nested(folder: Path, entry: dict[str, Any], batch: torch.Size) -> None:
    if not folder.is_dir() or folder.is_symlink():
        raise _damaged(folder, "the folder of a nested field is missing")
    found, _ = _check_collection(folder, batch)
    if entry["type"] != found.__name__:
        raise _damaged(folder, f"it holds a {found.__name__}, but the parent folder says {entry['type']!r}")


def _check_tensor(folder: Path, key: str, entry: dict[str, Any], batch: torch.Size) -> None:
    dtype = DTYPES.get(str(entry.get("dtype")))
    shape = _shape(entry.get("shape"))
    if dtype is None or shape is None or entry.get("is_nested", False) is not False:
        raise _damaged(
            folder / META,
            f"{key!r} has dtype {entry.get('dtype')!r} and shape {entry.get('shape')!r}, which is invalid",
        )
    if shape[: len(batch)] != batch:
        raise _damaged(
            folder / META, f"{key!r} has shape {list(shape)}, which does not begin with the batch size {list(batch)}"
        )
    path, size = folder / f"{key}.memmap", math.prod(shape) * dtype.itemsize
    try:
        info = path.stat()
    except FileNotFoundError:
        if size:
            raise _damaged(path, "the file is missing") from None
        return
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(info.st_mode) or info.st_size != size:
        what = f"it has {info.st_size:,} bytes" if stat.S_ISREG(info.st_mode) else "it is not a regular file"
        raise _damaged(path, f"{what}, but {entry['dtype']} of shape {list(shape)} takes {size:,} bytes")
    if not os.access(path, os.R_OK):
        raise DataError(f"{path}: no permission to read it")


def _read(folder: Path) -> dict[str, Any]:
    path = folder / META
    try:
        meta = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DataError(
            f"{folder}: {META} is missing, so this is not a saved tensorclass, or saving was interrupted; give a "
            "folder written by save()"
        ) from None
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
        raise _damaged(path, f"it is not JSON: {error}") from error
    if not isinstance(meta, dict):
        raise _damaged(path, f"it holds a {type(meta).__name__}, not a JSON object")
    return meta


def _shape(value: Any) -> torch.Size | None:
    if not isinstance(value, list) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in value):
        return None
    return torch.Size(value)


def class_names() -> str:
    """The names of the classes that can be saved, for messages."""
    return ", ".join(sorted({found.__name__ for found in CLASSES.values()}))


def _damaged(path: Path, what: str) -> DataError:
    return DataError(f"{path}: {what}. The folder is damaged, or saving was interrupted: save the data again")
