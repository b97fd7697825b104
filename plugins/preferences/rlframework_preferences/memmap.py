"""`MemmapTensorClass`: a tensordict tensorclass that saves atomically and checks what it loads.

tensordict writes a folder file by file, and maps any file that it finds: a full disk kills the process (SIGBUS), a file
that is too short is extended with zeros, and a missing one is skipped. Here, a folder is written under a temporary name
and renamed, its disk space is allocated before the first write, and shapes and dtypes must account for every byte of
its files. The layout is tensordict's own, so each reads what the other writes:

    meta.json              the class
    _tensordict/meta.json  batch size, and for each field its shape and dtype, or that it is nested
    _tensordict/F.memmap   the raw values of the field F, without a header
    _tensordict/F/         a nested tensordict (like `_tensordict`), or a nested tensorclass (like the whole folder)

Not supported: archives (`.tdz`), and values other than dense tensors (text, nested tensors, lazy stacks). There are no
checksums, since a mapped file may be written at any time; the class's `check()` finds values that violate its contract.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

import torch
from tensordict import TensorClass, is_tensor_collection, is_tensorclass
from tensordict.base import _register_tensor_class
from tensordict.utils import TensorDictFuture

from rlframework.base.errors import BatchError, BatchTypeError, DataError
from rlframework.base.files import replacing_directory

_FORMER_MODULES = {
    "rlframework_preferences.reward_data": ("rlframework.datasets.reward_data", "rlframework.data.reward_data"),
    "rlframework_preferences.pairs": ("rlframework.datasets.preferences", "rlframework.data.preferences"),
}
"""Modules of tensorclasses, and their former names, which folders of earlier versions have in `meta.json`."""

_META, _INNER = "meta.json", "_tensordict"
_SETTINGS = {"shape", "device", "_type", "_class", "_format_version", "_names"}


class SaveOptions(TypedDict, total=False):
    """See `MemmapTensorClass.memmap`."""

    num_threads: int
    return_early: bool
    share_non_tensor: bool


class MemmapTensorClass(TensorClass):
    """Base class of tensorclasses that are saved to and memory-mapped from a folder, and may be larger than memory.

    Saving replaces the folder atomically: an object that maps the old folder keeps its data until `memmap_refresh_`
    maps the new one. A process that opens a folder while it is being replaced may briefly find none. A mapped object is
    pickled as the paths of its files, so the unpickling process must see the same files.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for module in _FORMER_MODULES.get(cls.__module__, ()):
            _register_former_name(cls, module)

    def memmap(  # type: ignore[override] # the arguments of the interface; tensordict has more, here and below
        self, prefix: str | Path | None = None, copy_existing: bool = False, **options: Unpack[SaveOptions]
    ) -> Self:
        """Write all fields to the folder `prefix`, and return the same data mapped from there, locked.

        `prefix` is new, empty, or written by an earlier save, which is replaced atomically. Default: the folder that
        the data is mapped from, or else anonymous shared memory. A field that is mapped from another folder raises a
        `RuntimeError` unless `copy_existing`. `num_threads` threads write the files; with `return_early` as well, a
        `TensorDictFuture` is returned at once. `share_non_tensor` has no effect. Raises a `BatchTypeError` for fields
        that could not be loaded again.
        """
        saved: Self = _now_or_later(partial(_save, self, prefix, copy_existing), **options)
        return saved

    def memmap_(  # type: ignore[override]
        self, prefix: str | Path | None = None, copy_existing: bool = False, **options: Unpack[SaveOptions]
    ) -> Self:
        """Like `memmap`, but maps this object itself from `prefix`, and locks it."""

        def save(num_threads: int) -> Any:
            self.__dict__["_tensordict"] = _save(self, prefix, copy_existing, num_threads)._tensordict
            return self

        saved: Self = _now_or_later(save, **options)
        return saved

    def memmap_like(  # type: ignore[override]
        self, prefix: str | Path | None = None, copy_existing: bool = False, **options: Unpack[SaveOptions]
    ) -> Self:
        """Create a folder of zeros with these shapes and dtypes, mapped, to be filled row by row.

        Use it to create data larger than memory. Disk space is allocated immediately. This object may be expanded from
        one row, or be on the meta device; its values are ignored, but it must have all fields that will be needed:

        >>> import torch
        >>> from rlframework_preferences.reward_data import RewardData
        >>> row = {"input_ids": torch.zeros(8, dtype=torch.int32), "attention_mask": torch.zeros(8, dtype=torch.bool)}
        >>> one = RewardData(**row, end_scores=torch.zeros(()), batch_size=[])
        >>> rows = one.expand(1_000).memmap_like("rows")
        >>> ids = torch.arange(8, dtype=torch.int32)
        >>> rows[7] = RewardData.from_lengths(ids, torch.tensor(5), end_scores=torch.tensor(0.5))
        >>> RewardData.load_memmap("rows")[7].input_lengths
        tensor(5)
        """
        saved: Self = _now_or_later(partial(_save, self, prefix, copy_existing, like=True), **options)
        return saved

    save = memmap  # type: ignore[assignment]
    dumps = memmap  # type: ignore[assignment]

    @classmethod
    def load_memmap(  # type: ignore[override]
        cls,
        prefix: str | Path,
        device: torch.device | str | None = None,
        non_blocking: bool = False,
        *,
        out: Self | None = None,
    ) -> Self:
        """Load the folder `prefix`, memory-mapped and not locked: data is read when it is used.

        `device`: copy the data there; `"meta"` (or a `FakeTensorMode` around the call) opens no data file and gives
        only shapes and dtypes. `out`: an object of this class and batch size to fill and return. Raises a `DataError`
        if the folder is missing, damaged, incomplete or of another class.
        """
        folder = Path(prefix)
        load: Any = partial(super().load_memmap, folder, allow_pickle=False)
        try:
            _check_files(folder)
            _check_fields(shell := load(device="meta"))
            if type(shell) is not cls:
                found = type(shell).__name__
                raise DataError(f"{folder} holds a {found}, not a {cls.__name__}; load it with {found}.load_memmap")
            loaded: Self = load(device=device or (None if out is None else out.device), non_blocking=non_blocking)
        except (DataError, torch.OutOfMemoryError):
            raise
        except (ArithmeticError, AttributeError, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            raise DataError(
                f"{folder}: cannot be loaded: {error}. Give a folder written by save(); if it is one, it is damaged or "
                "saving was interrupted: save the data again"
            ) from error
        return loaded if out is None else _filled(out, loaded)

    load = load_memmap

    def load_memmap_(self, prefix: str | Path) -> Self:  # type: ignore[override]
        """Replace all fields by those saved in `prefix`, which must have the same batch size; return self.

        A mapped (locked) object is mapped and locked again. If the folder cannot be loaded, the object is unchanged.
        """
        return type(self).load_memmap(prefix, out=self)

    load_ = load_memmap_

    def memmap_refresh_(self) -> Self:  # type: ignore[override]
        """Load `saved_path` again, to which another process may have saved new data; return self.

        Works after `load_memmap` too. Values written into the mapped files are visible without it. Raises a `DataError`
        if this object is not mapped from a folder.
        """
        return self.load_memmap_(self.saved_path)

    def state_dict(
        self,
        destination: OrderedDict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        flatten: bool = False,
    ) -> OrderedDict[str, Any]:
        """Return the fields by name, for `load_state_dict`, with nested fields as dictionaries.

        `flatten`: name nested fields `outer.inner` instead (tensordict's default). `load_state_dict` accepts both.
        """
        state: OrderedDict[str, Any] = super().state_dict(destination, prefix, keep_vars, flatten)
        return state

    @property
    def saved_path(self) -> Path:  # type: ignore[override]
        """The folder that this object is mapped from. Raises a `DataError` if there is none."""
        folder = _folder_of(self)
        if folder is None:
            raise DataError(f"this {type(self).__name__} is not mapped from a folder; save() it, or load it from one")
        return folder


def _register_former_name(current: Any, module: str) -> None:
    """Have tensordict load folders of the class by the name that it had in `module`: it looks them up by that name."""

    def load(cls: type, *args: Any, **kwargs: Any) -> Any:
        return current._load_memmap(*args, **kwargs)

    former = type(current.__name__, (), {"__module__": module, "_load_memmap": classmethod(load)})
    _register_tensor_class(former)  # type: ignore[no-untyped-call]


def _now_or_later(
    write: Callable[..., Any], num_threads: int = 0, return_early: bool = False, share_non_tensor: bool = False
) -> Any:
    if not (return_early and num_threads):
        return write(num_threads=num_threads)
    later: Any = TensorDictFuture([], None)  # type: ignore[no-untyped-call]

    def finish() -> None:
        later.resulting_td = write(num_threads=num_threads)

    executor = ThreadPoolExecutor(1)
    later.futures.append(executor.submit(finish))
    executor.shutdown(wait=False)
    return later


def _save(data: Any, prefix: str | Path | None, copy_existing: bool, num_threads: int, like: bool = False) -> Any:
    """Write `data` (with `like`, zeros of its shapes), and return it mapped and locked."""
    for key, leaf in data.items(include_nested=True, leaves_only=True):
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided or leaf.is_nested:
            given = getattr(leaf, "layout", type(leaf).__name__)
            raise BatchTypeError(f"{key!r} is {given} and cannot be saved; make it a dense tensor")
        if leaf.is_meta and not like:
            raise BatchTypeError(f"{key!r} is on the meta device and has no values to save; use memmap_like")
    where = prefix if prefix is not None or like else _folder_of(data)
    base: Any = TensorClass
    if where is None:
        return base.memmap_like(data) if like else base.memmap(data)
    folder = Path(os.path.realpath(where))
    if os.path.lexists(folder) and not folder.is_dir():
        raise DataError(f"{folder} is a file; give an empty or new folder, or one written by save()")
    if folder.is_dir() and (foreign := sorted({path.name for path in folder.iterdir()} - {_META, _INNER})):
        raise DataError(
            f"{folder} holds {', '.join(foreign[:5])}, which saving would delete; give an empty or new folder"
        )
    with replacing_directory(folder) as new:
        if folder.is_dir():
            shutil.copymode(folder, new)
        source = data if like else data.apply(partial(_detached_from, folder))
        base.memmap_like(source, new, num_threads=num_threads)
        reserve(new)
        if not like:
            base.memmap(source, new, copy_existing, num_threads=num_threads)
        try:
            lost = set(data.keys(True, True)) - set(type(data).load_memmap(new, "meta").keys(True, True))
        except DataError as error:
            raise BatchTypeError(
                f"this {type(data).__name__} cannot be saved: its fields must be dense tensors, or TensorDicts of "
                f"them, under plain names ({error.__cause__})"
            ) from error
        if lost:
            raise BatchTypeError(f"{lost} cannot be names of saved fields: use letters, digits and _")
    return _lock_mapped(type(data).load_memmap(folder))


def reserve(folder: Path) -> None:
    """Allocate the disk space of all data files: writing to a mapped file on a full disk would kill the process."""
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    for path in folder.rglob("*.memmap"):
        if size := path.stat().st_size:
            with path.open("r+b") as file:
                os.posix_fallocate(file.fileno(), 0, size)


def _detached_from(folder: Path, leaf: torch.Tensor) -> torch.Tensor:
    """`leaf`; if it is mapped from `folder`, as a plain tensor, so that the mapping is copied and not a newer file."""
    name = getattr(leaf, "_filename", None)
    inside = name is not None and Path(os.path.realpath(name)).is_relative_to(folder)
    return leaf.as_subclass(torch.Tensor) if inside else leaf


def _lock_mapped(data: Any) -> Any:
    """Lock `data`, whose fields are mapped from files, and mark it as mapped."""
    inner = data._tensordict if is_tensorclass(data) else data
    inner._is_memmap = True
    for value in inner.values():
        if is_tensor_collection(value):
            _lock_mapped(value)
    return data.lock_()


def _folder_of(data: Any) -> Path | None:
    prefix = getattr(data._tensordict, "_memmap_prefix", None)
    return None if prefix is None else Path(prefix).parent


def _filled(out: Any, loaded: MemmapTensorClass) -> Any:
    wanted = type(loaded).__name__
    if type(out) is not type(loaded):
        raise BatchTypeError(f"out is a {type(out).__name__}; it must be a {wanted}")
    if out.batch_size != loaded.batch_size:
        raise BatchError(
            f"the batch size of the folder is {list(loaded.batch_size)}, that of this object {list(out.batch_size)}; "
            f"load a new object with {wanted}.load_memmap"
        )
    if out.is_memmap():
        _lock_mapped(loaded)
    elif out.is_locked:
        raise BatchError("out is locked; give an unlocked object, or one that is mapped from a folder")
    out.__dict__.update(loaded.__dict__)
    return out


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
