"""Tensors of a checkpoint as a mapping that reads each one when it is asked for, and which form a directory holds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rlframework.errors import DataError

if TYPE_CHECKING:
    from types import TracebackType

    import torch
    from torch import Tensor

INDEX, PIECES = ".metadata", ".distcp"
"""Of the sharded form: the file that maps shards to files, and the suffix of the files with shards."""
NATIVE = "native.json"
"""Of the native form: the file that names the backend that wrote the others."""


class Saved(Mapping[str, "Tensor"]):
    """The tensors of the directory `folder`, by name. Use as a context manager."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    @abstractmethod
    def __enter__(self) -> Saved: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Of the tensor `name`, which is not read."""

    def dtype(self, name: str) -> torch.dtype:
        """Of the tensor `name`, of which one element is read."""
        return self.part(name, tuple(slice(0, min(size, 1)) for size in self.shape(name))).dtype

    @abstractmethod
    def part(self, name: str, where: tuple[slice, ...]) -> Tensor:
        """The part `where` of the tensor `name`, of which no more is read."""


def is_sharded(folder: str | Path) -> bool:
    """Whether `folder` holds the sharded form, whole or not."""
    folder = Path(folder)
    return (folder / INDEX).exists() or any(folder.glob(f"*{PIECES}"))


def is_native(folder: str | Path) -> bool:
    """Whether `folder` holds an engine's own files."""
    return (Path(folder) / NATIVE).exists()


def require_no_native(folder: str | Path) -> None:
    """A `DataError` where `folder` holds an engine's own files."""
    if is_native(folder):
        raise DataError(
            f"{folder} holds a checkpoint in the format of the engine that wrote it ({NATIVE} says which), which that "
            "engine alone reads: resume the run with checkpoints.format=portable or sharded, and take what it saves"
        )


def part_of(tensors: Mapping[str, Tensor], name: str, where: tuple[slice, ...]) -> Tensor:
    """The part `where` of `tensors[name]`; of what lies in files no more is read than that."""
    return tensors.part(name, where) if isinstance(tensors, Saved) else tensors[name][where]
