"""`MemmapTensorClass`: a tensordict tensorclass that saves atomically and checks what it loads.

tensordict writes a folder file by file, and maps any file that it finds: a full disk kills the process (SIGBUS), a file
that is too short is extended with zeros, and a missing one is skipped. Here, a folder is written under a temporary name
and renamed, its disk space is allocated before the first write, and shapes and dtypes must account for every byte of
its files. The layout is tensordict's own, so each reads what the other writes:

    meta.json              the class
    _tensordict/meta.json  batch size, and for each field its shape and dtype, or that it is nested
    _tensordict/F.memmap   the raw values of the field F, without a header
    _tensordict/F/         a nested tensordict (like `_tensordict`), or a nested tensorclass (like the whole folder)

There are no checksums, since a mapped file may be written at any time; the class's `check()` finds values that violate
its contract. tensordict's other methods (`memmap_like`, `memmap_refresh_`, ...) are inherited, with its own guarantees.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
from tensordict import TensorClass, is_tensor_collection
from tensordict.base import _register_tensor_class

from rlframework.base.errors import BatchTypeError, DataError
from rlframework.base.files import replacing_directory

_FORMER_MODULES = {
    "rlframework_preferences.reward_data": ("rlframework.datasets.reward_data", "rlframework.data.reward_data"),
    "rlframework_preferences.pairs": ("rlframework.datasets.preferences", "rlframework.data.preferences"),
}
"""Modules of tensorclasses, and their former names, which folders of earlier versions have in `meta.json`."""

_META, _INNER = "meta.json", "_tensordict"
_SETTINGS = {"shape", "device", "_type", "_class", "_format_version", "_names"}


class MemmapTensorClass(TensorClass):
    """Base class of tensorclasses that are saved to and memory-mapped from a folder, and may be larger than memory."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for module in _FORMER_MODULES.get(cls.__module__, ()):
            _register_former_name(cls, module)

    def save(self, folder: str | Path) -> Self:  # type: ignore[override] # tensordict has more arguments, here and below
        """Write all fields to `folder`, and return the same data mapped from there.

        `folder` is new, empty, or written by an earlier save, which is replaced atomically: an object that maps the old
        folder keeps its data. Raises a `BatchTypeError` for fields that could not be loaded again: they must be dense
        tensors, or TensorDicts of them.
        """
        target = Path(os.path.realpath(folder))
        _check_target(target)
        try:
            with replacing_directory(target) as new:
                if target.is_dir():
                    shutil.copymode(target, new)
                plain = self.apply(lambda leaf: leaf.as_subclass(torch.Tensor))
                super(MemmapTensorClass, plain).memmap_like(new)
                reserve(new)
                super(MemmapTensorClass, plain).memmap(new)
                lost = set(self.keys(True, True)) - set(type(self).load(new, "meta").keys(True, True))
                if lost:
                    raise BatchTypeError(f"{lost} cannot be names of saved fields: use letters, digits and _")
        except (DataError, AttributeError, NotImplementedError, RuntimeError, TypeError) as error:
            raise BatchTypeError(
                f"this {type(self).__name__} cannot be saved: its fields must be dense tensors, or TensorDicts of "
                f"them, under plain names ({error})"
            ) from error
        return type(self).load(target)

    @classmethod
    def load(cls, folder: str | Path, device: torch.device | str | None = None) -> Self:
        """Load `folder`, memory-mapped and not locked: data is read when it is used.

        `device`: copy the data there; `"meta"` opens no data file and gives only shapes and dtypes. Raises a
        `DataError` if the folder is missing, damaged, incomplete or of another class.
        """
        folder = Path(folder)
        load: Any = partial(super().load_memmap, folder, allow_pickle=False)
        try:
            _check_files(folder)
            _check_fields(shell := load(device="meta"))
            if type(shell) is not cls:
                kind = type(shell).__name__
                raise DataError(f"{folder} holds a {kind}, not a {cls.__name__}; load it with {kind}.load")
            loaded: Self = load(device=device)
        except (DataError, torch.OutOfMemoryError):
            raise
        except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(
                f"{folder}: cannot be loaded: {error}. Give a folder written by save(); if it is one, it is damaged or "
                "saving was interrupted: save the data again"
            ) from error
        return loaded

    load_memmap = load  # type: ignore[assignment]


def _register_former_name(current: Any, module: str) -> None:
    """Have tensordict load folders of the class by the name that it had in `module`: it looks them up by that name."""

    def load(cls: type, *args: Any, **kwargs: Any) -> Any:
        return current._load_memmap(*args, **kwargs)

    former = type(current.__name__, (), {"__module__": module, "_load_memmap": classmethod(load)})
    _register_tensor_class(former)  # type: ignore[no-untyped-call]


def _check_target(folder: Path) -> None:
    """Raise a `DataError` if saving to `folder` would delete somebody's files."""
    if os.path.lexists(folder) and not folder.is_dir():
        raise DataError(f"{folder} is a file; give an empty or new folder, or one written by save()")
    if folder.is_dir() and (foreign := sorted({path.name for path in folder.iterdir()} - {_META, _INNER})):
        raise DataError(
            f"{folder} holds {', '.join(foreign[:5])}, which saving would delete; give an empty or new folder"
        )


def reserve(folder: Path) -> None:
    """Allocate the disk space of all data files: writing to a mapped file on a full disk would kill the process."""
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    for path in folder.rglob("*.memmap"):
        if size := path.stat().st_size:
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)


def _check_files(folder: Path) -> None:
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


def _check_fields(data: Any) -> None:
    """Check that `data` has the fields of its class, in shapes that begin with the batch size."""
    keys = set(data.keys())
    if dataclasses.is_dataclass(data):
        default = {field.name: field.default for field in dataclasses.fields(data)}
        needed = {name for name, value in default.items() if value is dataclasses.MISSING}
        if wrong := (needed - keys) | (keys - default.keys()):
            raise ValueError(f"the fields {sorted(wrong)} of {type(data).__name__} are missing, or unknown")
    for key, value in data.items():
        if value.shape[: data.ndim] != data.batch_size:
            raise ValueError(
                f"{key!r} has shape {list(value.shape)}, which does not begin with the batch size "
                f"{list(data.batch_size)}"
            )
        if is_tensor_collection(value):
            _check_fields(value)
