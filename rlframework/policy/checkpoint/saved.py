"""A checkpoint's tensors as a mapping that reads each one on access, and detection of a directory's form."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rlframework.errors import DataError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from rlframework.policy.model_state import WeightSpec

INDEX, SHARD_SUFFIX = ".metadata", ".distcp"
"""In the sharded form: the file that maps shards to files, and the suffix of the files that contain them."""
NATIVE = "native.json"
"""In the native form: the file that names the backend that wrote the others."""


class Saved(Mapping[str, "Tensor"]):
    """The tensors in the directory `folder`, by name; the end of the context closes its files.

    Raises a `DataError` if files are missing or damaged.
    """

    def __init__(self, folder: str | Path, entries: Mapping[str, Any]) -> None:
        """`entries`: an object for each tensor, with which a subclass finds it."""
        self.folder, self._entries = Path(folder), entries

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._entries = {}

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the tensor `name` without reading it."""

    @abstractmethod
    def read_slice(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """Read only `where` of the tensor `name`."""

    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype of the tensor `name`, reading a single element."""
        return self.read_slice(name, tuple(slice(0, min(size, 1)) for size in self.shape(name))).dtype

    def __getitem__(self, name: str) -> Tensor:
        return self.read_slice(name, tuple(slice(0, size) for size in self.shape(name)))

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def is_sharded(folder: str | Path) -> bool:
    """Return True if `folder` contains the sharded form, complete or not."""
    folder = Path(folder)
    return (folder / INDEX).exists() or any(folder.glob(f"*{SHARD_SUFFIX}"))


def is_native(folder: str | Path) -> bool:
    """Return True if `folder` contains an engine's own files."""
    return (Path(folder) / NATIVE).exists()


def reject_native(folder: str | Path) -> None:
    """Raise a `DataError` if `folder` contains an engine's own files."""
    if is_native(folder):
        raise DataError(
            f"{folder} is a checkpoint in the format of the engine that wrote it (named in {NATIVE}), which only that "
            "engine reads; resume the run with checkpoints.format=portable or sharded, and use what it saves"
        )


def slice_of(tensors: Mapping[str, Tensor], name: str, where: tuple[slice, ...]) -> Tensor:
    """Return `where` of `tensors[name]`, reading no more than that from files."""
    return tensors.read_slice(name, where) if isinstance(tensors, Saved) else tensors[name][where]


def require_weights(saved: Saved, specs: Mapping[str, WeightSpec]) -> None:
    """Raise a `DataError` that names the differences between saved weights and those of the model."""
    if found := differences({name: saved.shape(name) for name in saved}, specs):
        raise DataError(f"the checkpoint {saved.folder} is for another model: it {found}")


def differences(shapes: Mapping[str, tuple[int, ...]], specs: Mapping[str, WeightSpec]) -> str:
    """Describe how saved tensors of `shapes` differ from `specs`, as a clause about what was saved; "" if equal."""
    missing, extra = sorted(specs.keys() - shapes.keys()), sorted(shapes.keys() - specs.keys())
    other = sorted(name for name in specs.keys() & shapes.keys() if shapes[name] != specs[name].shape)
    found = [f"lacks {missing[:3]}"] * bool(missing) + [f"has unexpected {extra[:3]}"] * bool(extra)
    found += [f"has {name} of shape {shapes[name]} instead of {specs[name].shape}" for name in other[:3]]
    return ", ".join(found)
