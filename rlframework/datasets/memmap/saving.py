"""Write a tensorclass to a folder atomically, and return it mapped from the final files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from tensordict import MemoryMappedTensor, TensorClass, TensorDict, is_tensor_collection, is_tensorclass

from rlframework.datasets.memmap import folder as memmap_folder
from rlframework.errors import BatchTypeError

DataT = TypeVar("DataT")


def save(data: DataT, prefix: str | Path | None, *, like: bool, copy_existing: bool, num_threads: int) -> DataT:
    """Write `data` (with `like`, zeros of its shapes), and return it mapped and locked; see `MemmapTensorClass`."""
    _check_savable(data, values=not like)
    where = prefix if prefix is not None or like else folder_of(data)
    base: Any = TensorClass
    if where is None:
        return base.memmap_like(data) if like else base.memmap(data)  # type: ignore[no-any-return]
    folder = Path(os.path.realpath(where))
    with memmap_folder.replacing_saved(folder) as new:
        source = data if like else _detached_from(data, folder)
        saved = base.memmap_like(source, new, num_threads=num_threads)
        memmap_folder.reserve(new)
        if not like:
            saved = base.memmap(source, new, copy_existing, num_threads=num_threads)
    _relocate(saved, new, folder)
    return saved  # type: ignore[no-any-return]


def save_in_place(data: DataT, prefix: str | Path | None, *, copy_existing: bool, num_threads: int) -> DataT:
    """Save like `save`; afterwards `data` itself is mapped and locked."""
    saved: Any = save(data, prefix, like=False, copy_existing=copy_existing, num_threads=num_threads)
    data.__dict__["_tensordict"] = saved._tensordict
    return data


def nodes(data: Any) -> Iterator[TensorDict]:
    """Yield the tensordicts in `data`, outermost first; a `BatchTypeError` for one that cannot be saved."""
    known = is_tensorclass(data) and str(type(data)) in memmap_folder.CLASSES
    inner = data._tensordict if known else data
    if type(inner) is not TensorDict:
        raise BatchTypeError(
            f"a {type(inner).__name__} cannot be saved: fields are dense tensors, TensorDicts of them, and "
            f"{memmap_folder.class_names()}; pad lazy stacks, and store text elsewhere"
        )
    yield inner
    for value in inner.values():
        if is_tensor_collection(value):
            yield from nodes(value)


def folder_of(data: Any) -> Path | None:
    """The folder that the tensorclass `data` is mapped from, or None."""
    prefix = getattr(data._tensordict, "_memmap_prefix", None)
    return None if prefix is None else Path(prefix).parent


def _check_savable(data: Any, *, values: bool) -> None:
    for node in nodes(data):
        for key, value in node.items():
            if not memmap_folder.is_plain_key(key):
                raise BatchTypeError(f"{key!r} is not a valid name of a saved field: use letters, digits and _ . ~ -")
            if not isinstance(value, torch.Tensor):
                continue
            if value.layout is not torch.strided or value.is_nested or str(value.dtype) not in memmap_folder.DTYPES:
                raise BatchTypeError(
                    f"{key!r} is {value.dtype} of layout {value.layout} and cannot be saved: make it dense, with dtype "
                    f"{', '.join(memmap_folder.DTYPES)}"
                )
            if values and value.is_meta:
                raise BatchTypeError(f"{key!r} is on the meta device and has no values to save; use memmap_like")


def _detached_from(data: Any, folder: Path) -> Any:
    """`data`, with fields that are mapped from their own file in `folder` as plain tensors, which tensordict copies.

    Copying reads the mapping, not the file, which may have been replaced since.
    """

    def plain(key: str | tuple[str, ...], leaf: Any) -> Any:
        name = leaf._filename if isinstance(leaf, MemoryMappedTensor) else None
        if name is None or not Path(os.path.realpath(name)).is_relative_to(folder):
            return leaf
        keys = (key,) if isinstance(key, str) else key
        parts = Path(os.path.realpath(name)).relative_to(folder).parts
        own = [part for part in parts if part != memmap_folder.INNER] == [*keys[:-1], f"{keys[-1]}.memmap"]
        return leaf.as_subclass(torch.Tensor) if own else leaf

    return data.apply(plain, named=True, nested_keys=True)


def _relocate(saved: Any, old: Path, new: Path) -> None:
    """Update the paths in `saved`, whose mapped files moved from `old` to `new`."""
    for node in nodes(saved):
        inner: Any = node
        inner._memmap_prefix = new / Path(inner._memmap_prefix).relative_to(old)
        for leaf in inner.values():
            if isinstance(leaf, MemoryMappedTensor) and leaf._filename is not None:
                leaf._filename = str(new / Path(leaf._filename).relative_to(old))
